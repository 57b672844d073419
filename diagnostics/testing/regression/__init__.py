"""Numerical regression tests of attention kernels: ``attn_diag.check`` and ``attn-diag check``.

What is asked of a kernel, and why it neither flakes nor misses (measured by ``benchmarks/study_check.py``):

- **Same inputs.** Cases are drawn on the CPU from the seed, so they do not depend on the device; each has 16
  independent sequences, but for one real head. Every case is run twice. Where the two runs differ, both are judged
  (the second as a case of its own), and nothing is held to bits.
- **Bias** (excess of O, of |O|, of delta: what lies beyond one correct rounding). The sequence is the cluster: t with
  G - 1 degrees of freedom, so that the statement is about the kernel and not about one K and V. With a baseline the two
  means are compared by Welch's test; equal bits on equal inputs cannot differ and are not tested. Without one the
  null is an interval: from 0 to the mean of the published recipe on these very inputs (on the normaliser inputs, where
  l sums P_bar before its cast, FlashAttention-2 itself is off by 0.49 ulp), widened by 1 / sqrt(12 T) ulp: a smaller
  bias adds up, over T rows, to less than the random walk of correct rounding, sqrt(T / 12) ulp. (torch's SDPA on a CPU
  has a true bias of 0.009 ulp away from zero, from its exp; at T = 192 the margin is 0.021.) Of dQ, dK and dV the mean
  is their factor, <error, true> / ||true||^2, with one rounding's relative rms / sqrt(T) as margin (1.6e-4 in BF16 at
  T = 192), and the interval reaches to a documented kernel's factor too: where all rows are alike, casts err to one
  side (dK of torch's efficient kernel is 1.002 times the true one on constant rows). Holm over all tests
  of a run: the chance that a healthy kernel fails one is at most ``level``.
- **Quantities.** O, L, dQ, dK and dV of all sequences together, judged as ``inspect`` judges them: NaN and Inf
  (``nonfinite``), what no rounding makes (``wrong``) and, without a baseline, an error whose 99 % interval lies above
  1.25 times that of a well-rounded kernel (``lossy``), unless a published kernel makes the same error on these inputs
  (``documented``: torch's efficient and CPU kernels, kernels whose l sums the cast P). delta as it follows from O is
  no quantity of its own. A gradient in which a well-rounded kernel has no correct digit (error above 100 %: a one-hot
  row has no dQ) is not judged.
- **Growth.** With a baseline a quantity may be as lossy as that, but its error may not grow by more than sqrt(5/4), as
  one more independent rounding makes whose errors are half as large as O's own. What is compared is ln(error / the
  published recipe's error on the same sequence), which hardly depends on the inputs; where they are not the baseline's
  (another seed), the growth must also be beyond chance (Welch over sequences: the errors of dK on inputs with outliers
  differ between seeds by a third).
- **Declared** kernels (``declared``: below 16 bits) are held to their recipe on the same inputs in the place of a
  published one of 16 bits, as ``inspect`` does. A mean has the interval about that recipe's widened by its own random
  walk, its rms error / sqrt(T); culprits are not searched by bits, which no such recipe has.
- **Arrangements**: what ``attn_diag.invariance`` finds of one call. More than rounding is a failure (``invariance``),
  and so is any bit that later tokens, other batch items or heads change; other bits for another batch size are none.
- **Bits**: only where ``exact`` asks for them, and where device, versions and inputs are the baseline's.
"""

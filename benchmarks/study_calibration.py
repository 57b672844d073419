"""How often the bias tests alarm without a bias, and how often they find a planted one, on the real captures.

    python benchmarks/study_calibration.py --redraws 10000 --device cuda --processes 16 --json FILE
    python benchmarks/study_calibration.py --markdown FILE [--brief]       # tables from a JSON file

What is called is the product's own: the errors as ``measure`` forms them, ``means.mean_test`` and ``means.two_way``
(which are all of ``estimate_bias``'s inference, vectorised), the clusters of ``pooling``, and ``means.adjust``.

Kernels without bias ("nulls"). Which test each is a null of is not assumed: the mean over all redraws is measured in
the test's own standard errors, and "is_null" says whether it vanishes.

On the captured inputs, the same in every redraw:

- o_stochastic: O_ref rounded stochastically to BF16. E[O] = O_ref, so a null of the mean of O and of delta. Not of the
  excesses: E[O] - RN(O_ref) = O_ref - RN(O_ref) is not zero.
- o_flips: RN(O_ref) with 5 % of the elements moved by one spacing up or down: a null of the three excesses, but not of
  delta (RN(O_ref) - O_ref stays).
- gradients: dS and then dQ rounded stochastically to BF16, LSE to fp32: nulls of dQ and LSE.

On fresh inputs with the capture's structure: q, k, v and dO turned by random rotations (Q and K together) and rounded
to BF16 again, so that P stays what it is but for its last bits, and where O falls between two BF16 numbers is new:

- probs_stochastic: P_bar rounded stochastically, P_bar V / l in float64, O rounded to nearest-even: all primary tests.
  With the inputs fixed it would be no null: an O near a tie is pushed over it in one direction only.
- probs_nearest: P_bar cast to nearest-even, l sums the cast P_bar: all primary tests.
- rounded: a correctly rounding kernel: delta. Its errors are the same in rows that copy the same rows of V. The
  excesses are zero and not tested.
- probs_mismatched: FlashAttention-2's way, l sums the uncast P_bar: no null by construction, shown beside the others.

(Stochastic rounding of S is no null: the exponential turns unbiased noise of S into a bias of P.)

V -> -V turns the sign of delta's errors and of O's excess, and rotations draw V and -V alike: their means vanish
exactly. The excess away from zero keeps its sign, so there the measured mean alone shows it.

Sequences: 8 consecutive redraws of a head are the sequences of a batch. Planted biases: every element of O moves by one
spacing with the stated probability, away from zero, upwards, or along dO (the direction that delta sees), on a
correctly rounding kernel and on probs_stochastic. Power at the minimum detectable bias: the mean that one redraw states
is planted in the next.

Heads of a capture take turns, so that every rate is over independent redraws; families hold all heads. Intervals are
Clopper & Pearson's, 95 %. The test was chosen among the candidates on other seeds than the one reported.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from calibration import markdown
from calibration.draws import GAUSSIAN, capture_names
from calibration.engine import Outcomes, run
from calibration.summary import summarise
from measuring import made_by, options_of

# Redraws of one job: enough jobs for many processes, and few enough to fill a GPU's batches.
_SHARD = 500
_REPORT_SEED = 20261122


def _shard(capture: str, redraws: int, seed: int, device: str) -> Outcomes:
    torch.set_num_threads(1)
    return run(capture, redraws, seed, torch.device(device))


def study(names: list[str], redraws: int, seed: int, device: str, processes: int) -> dict[str, Any]:
    """The summaries of all captures, by name. Results depend on the seed and the redraws, not on ``processes``."""
    sizes = [min(_SHARD, redraws - start) for start in range(0, redraws, _SHARD)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = {
            name: [pool.submit(_shard, name, n, seed + 7919 * i, device) for i, n in enumerate(sizes)] for name in names
        }
        found = {}
        for name, parts in jobs.items():
            found[name] = summarise(Outcomes.join([job.result() for job in parts]))
            print(f"{name}: {redraws} redraws", file=sys.stderr)
    return found


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    parser.add_argument("--captures", nargs="+", default=capture_names(), choices=capture_names(), metavar="NAME")
    parser.add_argument("--redraws", type=int, default=2000, help="per capture")
    parser.add_argument("--seed", type=int, default=_REPORT_SEED)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the tables of a result and stop")
    parser.add_argument("--brief", action="store_true", help="with --markdown: only the README's table")
    arguments = parser.parse_args()
    if arguments.markdown:
        made = json.loads(arguments.markdown.read_text())
        print(markdown.trust(made) if arguments.brief else markdown.section(made))
        return
    asked = arguments.captures
    result = made_by(arguments.device) | {
        "redraws": arguments.redraws,
        "seed": arguments.seed,
        "gaussian": [name for name in asked if "gauss" in name or name in (GAUSSIAN, "gqa_T200")],
        "captures": study(asked, arguments.redraws, arguments.seed, arguments.device, arguments.processes),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(markdown.section(result))


if __name__ == "__main__":
    main()

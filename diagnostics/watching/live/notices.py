"""What a user is told where nothing can be seen, by whoever watches."""

COMPILED = (
    "the model is compiled: attention inside compiled graphs is not seen. Compile all but the attention, or run the "
    'steps in question under torch.compiler.set_stance("force_eager") (uncompiled, with other roundings)'
)
UNSEEN = (
    "no attention call was seen. It may run inside a compiled graph or on the fast path of nn.TransformerEncoder in "
    "eval mode (torch.backends.mha.set_fastpath_enabled(False)), call a kernel that is not known here, or be another "
    "model's than the one that was given (a copy's, say)"
)
UNSTEPPED = "no torch.optim optimizer stepped, so all calls count as one step's: call end_step() after every step"
UNFINISHED = "attention was called in a step to be looked at, but no backward pass came to any of its calls"

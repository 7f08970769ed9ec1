"""The model side of `moetrace demo`: a real MoE model over gloo ranks and real text."""

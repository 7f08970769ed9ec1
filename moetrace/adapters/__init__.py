"""Where a framework's MoE layer is recognised. One module per framework, imported lazily."""

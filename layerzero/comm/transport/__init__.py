"""How the ranks of one ZeRO-3 group move weights and gradients."""

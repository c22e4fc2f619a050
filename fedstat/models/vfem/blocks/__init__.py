"""One institution's block during a fit, the response beside it, and who takes part."""

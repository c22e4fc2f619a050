"""The dry run behind ``explain()``: what would be asked, what would leave, who could learn what."""

"""Linear predictors of new entities: what is asked, of whom, and how the answers are put together."""

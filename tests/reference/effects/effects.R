# Adjusted means and contrasts of R's emmeans (1.8.4 or later), for tests/models/test_effects_references.py.
# Rscript tests/reference/effects/effects.R tests/reference/effects
library(emmeans)
folder <- commandArgs(TRUE)[1]
d <- read.csv(file.path(folder, "rows.csv"), stringsAsFactors = TRUE)
written <- function(name, table) {
  table <- as.data.frame(table)
  write.csv(format(table, digits = 12), file.path(folder, paste0(name, ".csv")), row.names = FALSE)
}
m <- glm(e ~ x + g * h, binomial, d)
written("logit_means", emmeans(m, "g", type = "response"))
written("logit_pairs", confint(pairs(emmeans(m, "g"), adjust = "tukey")))
written("logit_tests", pairs(emmeans(m, "g"), adjust = "holm"))
written("logit_by", pairs(emmeans(m, ~ g | h), adjust = "bonferroni"))
l <- lm(y ~ x + g + h, d)
written("linear_means", emmeans(l, "g"))
written("linear_tukey", confint(pairs(emmeans(l, "g"), adjust = "tukey")))
written("linear_holm", confint(pairs(emmeans(l, "g"), adjust = "holm")))
written("linear_tests", pairs(emmeans(l, "g"), adjust = "tukey"))

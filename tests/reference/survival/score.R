# Rscript score.R patients.csv score.json: time-dependent AUC and Brier scores by R's riskRegression (Kaplan-Meier
# weights), of predictions by a Cox model on whole months.
suppressMessages({library(survival); library(riskRegression); library(prodlim); library(jsonlite)})
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$months <- ceiling(d$months)
times <- c(12, 24, 36)
fit <- coxph(Surv(months, died) ~ age + stage, d, x = TRUE, control = coxph.control(eps = 1e-12, toler.chol = 1e-13))
curve <- survfit(fit, newdata = d)
risk <- 1 - t(summary(curve, times = times)$surv)
s <- Score(list(cox = risk), formula = Hist(months, died) ~ 1, data = d, times = times, cens.model = "km",
           metrics = c("auc", "brier"), summary = NULL, se.fit = FALSE, conf.int = FALSE)
brier <- s$Brier$score
found <- list(times = times, auc = s$AUC$score$AUC, brier = brier$Brier[brier$model == "cox"],
              null = brier$Brier[brier$model == "Null model"], coef = unname(coef(fit)),
              version = paste(R.version.string, "riskRegression", packageVersion("riskRegression")))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE)

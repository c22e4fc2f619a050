# Rscript competing.R patients.csv competing.json: late entry and competing events by R's survival and cmprsk.
library(survival)
library(cmprsk)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$quarter <- 3 * ceiling(d$months / 3)
d$start <- 3 * floor(d$entry / 3)
d$event <- factor(d$cause, levels = c("none", "relapse", "death"))
d$group <- paste(d$arm, d$stage)
late <- summary(survfit(Surv(start, quarter, died) ~ arm, d, conf.type = "log-log"), censored = TRUE)
competing <- function(type) {
  s <- summary(survfit(Surv(quarter, event) ~ arm, d, conf.type = type), censored = TRUE)
  list(group = as.character(s$strata), time = s$time, n_risk = s$n.risk[, 1],
       incidence = s$pstate[, 2:3], std_error = s$std.err[, 2:3], conf_low = s$lower[, 2:3],
       conf_high = s$upper[, 2:3])
}
both <- summary(survfit(Surv(start, quarter, event) ~ arm, d, id = seq_len(nrow(d))), censored = TRUE)
gray <- function(group, rho = 0) unname(cuminc(d$quarter, d$cause, group, rho = rho, cencode = "none")$Tests[, 1])
cumulative <- timepoints(cuminc(d$quarter, d$cause, d$arm, cencode = "none"), c(12, 24, 36))
found <- list(
  late = list(group = as.character(late$strata), time = late$time, n_risk = late$n.risk, survival = late$surv,
              std_error = late$std.err, conf_low = late$lower, conf_high = late$upper),
  loglog = competing("log-log"), log = competing("log"), plain = competing("plain"),
  both = list(time = both$time, incidence = both$pstate[, 2:3]),
  causes = c("relapse", "death"),
  cuminc = list(rows = rownames(cumulative$est), estimate = unname(cumulative$est)),
  gray = list(causes = c("death", "relapse"), arm = gray(d$arm), group = gray(d$group), rho1 = gray(d$group, 1)),
  version = paste(R.version.string, "survival", packageVersion("survival"), "cmprsk", packageVersion("cmprsk")))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE, na = "null")

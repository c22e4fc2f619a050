# Full information maximum likelihood of lavaan, with random covariates and observed information.
#
#   python tests/models/vfem/lavaan_table.py table.csv && Rscript tests/models/vfem/lavaan_fiml.R table.csv
#
# Prints what lavaan_fiml.json holds.

suppressMessages(library(lavaan))
table <- read.csv(commandArgs(TRUE)[1])
# In units of about one; what is printed is in those of the table again.
unit <- sapply(table, sd, na.rm = TRUE)
covariates <- setdiff(names(table), "y")
units <- as.data.frame(scale(table, FALSE, unit))
fiml <- function(...) {
  # The model of no covariances, which lavaan fits beside it, is not asked for.
  suppressWarnings(sem(..., data = units, missing = "ml", fixed.x = FALSE, meanstructure = TRUE,
                       information = "observed"))
}
fit <- fiml(paste("y ~", paste(covariates, collapse = " + ")))
stopifnot(lavInspect(fit, "converged"))
# Its optimizer stops some 1e-4 standard errors away: Newton's steps with its own derivatives go on.
for (again in 1:2) {
  at <- parTable(fit)
  free <- at$free > 0
  step <- solve(lavInspect(fit, "hessian"), lavTech(fit, "gradient"))
  at$start[free] <- at$ustart[free] <- at$est[free] <- at$est[free] - step[at$free[free]]
  fit <- fiml(at, optim.method = "none")
}
found <- parameterEstimates(fit)
ours <- found[found$lhs == "y" & found$op %in% c("~1", "~"), ]
ours <- ours[order(ours$op != "~1"), ]
back <- unit["y"] / c(1, unit[covariates])
number <- function(values) paste(sprintf("%.10g", values), collapse = ", ")
cat('{"lavaan": "', as.character(packageVersion("lavaan")), '",\n', sep = "")
cat('"names": ["', paste(c("Intercept", ours$rhs[-1]), collapse = '", "'), '"],\n', sep = "")
cat('"estimates": [', number(ours$est * back), "],\n", sep = "")
cat('"errors": [', number(ours$se * back), "],\n", sep = "")
residual <- found$est[found$lhs == "y" & found$op == "~~" & found$rhs == "y"]
cat('"variance": ', number(residual * unit["y"]^2), ",\n", sep = "")
# Of rows that see something, and of all columns: that of the fit less the logarithms of the units.
seen <- colSums(!is.na(table))
cat('"log_likelihood": ', number(fitMeasures(fit, "logl") - sum(seen * log(unit))), "}\n", sep = "")

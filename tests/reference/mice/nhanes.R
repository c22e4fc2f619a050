# Bayesian linear regression imputation (mice's "norm") of adults of NHANES 2009-2012, pooled by Rubin's rules.
# Rscript nhanes.R NHANESraw.csv.gz > nhanes.json
suppressMessages(library(mice))
table <- read.csv(commandArgs(TRUE)[1])
columns <- c("Age", "BMI", "Height", "BPSysAve", "Pulse", "DirectChol", "TotChol")
table <- table[table$Age >= 20, columns]
imp <- mice(table, m = 100, maxit = 15, method = "norm", seed = 1, printFlag = FALSE)
one <- function(formula) {
  pooled <- pool(with(imp, lm(formula(formula))))
  s <- summary(pooled)
  numbers <- function(x) paste0("[", paste(sprintf("%.10g", x), collapse = ", "), "]")
  paste0("{\"estimate\": ", numbers(s$estimate), ", \"std_error\": ", numbers(s$std.error),
         ", \"between\": ", numbers(pooled$pooled$b), ", \"fmi\": ", numbers(pooled$pooled$fmi), "}")
}
right <- "Age + BMI + Height + Pulse + DirectChol + TotChol"
cat("{\"BPSysAve\": ", one(paste("BPSysAve ~", right)), ",\n \"TotChol\": ",
    one("TotChol ~ Age + BMI + BPSysAve"), "}\n", sep = "")

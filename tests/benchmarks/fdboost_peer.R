# FDboost on curves that another process wrote as raw doubles, by column, and the CPU seconds of its fit.
#
#   Rscript fdboost_peer.R FOLDER ROWS POINTS PREDICTORS STEPS
#
# Prints the version, CPU and wall seconds, and the sum of squares that is left.

suppressMessages(library(FDboost))
given <- commandArgs(trailingOnly = TRUE)
folder <- given[1]
size <- as.integer(given[2:5])

curves <- function(name) {
  matrix(readBin(file.path(folder, name), "double", n = size[1] * size[2]), size[1], size[2])
}
names <- paste0("x", seq_len(size[3]) - 1)
data <- lapply(setNames(names, names), curves)
data$y <- curves("y")
data$s <- data$t <- seq(0, 1, length.out = size[2])
learners <- paste0("bsignal(", names, ", s, knots = 10, df = 4)", collapse = " + ")

before <- proc.time()
fit <- FDboost(as.formula(paste("y ~ 1 +", learners)), timeformula = ~bbs(t, knots = 10, df = 4), data = data,
               offset = colMeans(data$y), control = boost_control(mstop = size[5], nu = .1))
spent <- proc.time() - before
cat(as.character(packageVersion("FDboost")), spent[["user.self"]] + spent[["sys.self"]], spent[["elapsed"]],
    format(tail(fit$risk(), 1), digits = 10), "\n")

# Paths of glmnet on data that another process wrote as raw doubles, and their CPU seconds.
#
#   Rscript glmnet_peer.R FOLDER ROWS COLUMNS FAMILY ALGORITHM REPEATS THRESH,THRESH,...
#
# FOLDER holds X (by column), y and lambdas. Prints the version, then a line for each fit: thresh, CPU, wall.
# Writes the coefficients at each thresh to FOLDER/THRESH: for each lambda the intercept and the slopes.

suppressMessages(library(glmnet))
given <- commandArgs(trailingOnly = TRUE)
folder <- given[1]
rows <- as.integer(given[2])
columns <- as.integer(given[3])
family <- given[4]
algorithm <- given[5]
repeats <- as.integer(given[6])

doubles <- function(name) {
  file <- file.path(folder, name)
  readBin(file, "double", n = file.size(file) / 8)
}
X <- matrix(doubles("X"), rows, columns)
y <- doubles("y")
lambdas <- doubles("lambdas")

# The columns are standardized already; the algorithm of the other family is not read.
fit <- function(thresh) {
  glmnet(X, y, family = family, lambda = lambdas, standardize = FALSE, thresh = thresh,
         type.gaussian = if (family == "gaussian") algorithm else "covariance",
         type.logistic = if (family == "binomial") algorithm else "Newton")
}

cat(as.character(packageVersion("glmnet")), "\n")
for (thresh in strsplit(given[7], ",")[[1]]) {
  for (again in seq_len(repeats)) {
    before <- proc.time()
    path <- fit(as.numeric(thresh))
    spent <- proc.time() - before
    cat(thresh, spent[["user.self"]] + spent[["sys.self"]], spent[["elapsed"]], "\n")
  }
  stopifnot(length(path$lambda) == length(lambdas), path$jerr == 0)
  writeBin(as.double(rbind(path$a0, as.matrix(path$beta))), file.path(folder, thresh))
}

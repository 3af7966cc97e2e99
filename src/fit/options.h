// Options of `tandem fit`. One that is not given takes the method's default; one that no chosen
// method reads is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fit/problem/objective.h"
#include "tandem/codec.h"

namespace tandem::fit {

/// --fail: a client that takes no part in rounds [first, last].
struct Failure {
  int client = 0;
  int64_t first = 0, last = 0;
  /// Parses CLIENT@ROUND (to the end) and CLIENT@FIRST-LAST. Throws InvalidArgument.
  static Failure parse(const std::string& text);
};

/// --l2: a number, or auto:kappa=K, the one with which the clients' condition number is K.
struct L2 {
  double value = 0;
  std::optional<double> kappa = {};
  /// Throws InvalidArgument.
  static L2 parse(const std::string& text);
};

struct FitOptions {
  Loss loss = Loss::logistic;
  double l1 = 0;
  L2 l2 = {};
  int clients = 16;
  bool shuffle = false;
  uint64_t seed = 0;
  double tol = 1e-8;
  int64_t max_rounds = 1000;
  bool control = false;  ///< leave out what makes the method work (MethodRow::control)
  // Read by some methods only:
  std::optional<double> p = {};           ///< probability that a local step ends the round
  std::optional<double> step = {};        ///< step size, times the default
  std::optional<int> sparsity = {};       ///< senders of each coordinate
  std::optional<int> cohort = {};         ///< clients of a round
  std::optional<std::string> graph = {};  ///< ring, torus, random4 or a file of edges
  std::optional<Wire> codec = {};         ///< of what neighbours exchange
  std::optional<int> tokens = {};
  std::optional<double> tau = {};  ///< weight of the attraction to the tokens
  bool async = false;              ///< tokens wait for no others (MethodRow::run_async)
  std::vector<Failure> failures = {};

  /// Whether `client` takes part in `round`, which counts from 1.
  bool is_alive(int client, int64_t round) const;
};

}  // namespace tandem::fit

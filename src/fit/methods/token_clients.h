// Clients of API-BCD, and what they and the tokens remember.
#pragma once

#include <vector>

#include "fit/methods/method.h"

namespace tandem::fit {

struct ApiBcdParams {
  int tokens = 1;
  double tau = 0;

  /// Numbers of a message: a TokenTable.
  int64_t floats(const Problem& problem) const {
    return tokens * (int64_t(problem.features()) + 1);
  }
  std::vector<Setting> settings() const { return {{"tokens", double(tokens)}, {"tau", tau}}; }
};

/// The latest known share of each token, with the round of the visit that made it: what a client
/// remembers, and the message in which a token moves.
class TokenTable {
 public:
  TokenTable(int tokens, size_t features)
      : width_(features + 1), numbers_(size_t(tokens) * width_, 0.0) {}

  double& round(int token) { return numbers_[size_t(token) * width_]; }
  double round(int token) const { return numbers_[size_t(token) * width_]; }
  std::span<double> share(int token) {
    return std::span(numbers_).subspan(size_t(token) * width_ + 1, width_ - 1);
  }
  std::span<const double> share(int token) const {
    return std::span(numbers_).subspan(size_t(token) * width_ + 1, width_ - 1);
  }
  std::span<double> numbers() { return numbers_; }
  /// Takes the shares that are newer.
  void merge(const TokenTable& other);
  /// Sum of the shares: the mean of the clients' answers, as far as this table knows.
  Vector sum() const;

 private:
  int tokens() const { return int(numbers_.size() / width_); }

  size_t width_;
  Vector numbers_;
};

/// The clients of a rank.
class TokenClients {
 public:
  TokenClients(const Setup& setup, const ApiBcdParams& params);

  /// Solves the problem of `client`, of this rank, near the mean that it and the token know, and
  /// adds what its answer has changed to the share of `token`. `table` is what the token carries.
  void visit(int client, int token, int64_t round, TokenTable& table);

 private:
  struct Client {
    Objective f;
    Vector x;
    TokenTable known;
  };

  const Setup setup_;
  const ApiBcdParams params_;
  std::vector<Client> clients_;
};

}  // namespace tandem::fit

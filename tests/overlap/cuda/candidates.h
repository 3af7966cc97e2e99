// Candidates of a dense operator on GPUs.
#pragma once

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "tune/candidate.h"

namespace tandem::test {

/// Candidates that can run here.
template <typename Op>
std::vector<Candidate> candidates_of(const Op& op) {
  std::vector<Candidate> all = op.candidates();
  std::erase_if(all, [](const Candidate& one) { return !one.refusal.empty(); });
  return all;
}

/// Candidates of a family, or the one of that name.
template <typename Op>
std::vector<Candidate> candidates_of(const Op& op, std::string_view group) {
  std::vector<Candidate> all = candidates_of(op);
  std::erase_if(all, [&](const Candidate& one) { return one.group() != group; });
  return all;
}

/// The first of them; the only candidate if there is only one, as on one rank.
template <typename Op>
Candidate candidate_of(const Op& op, std::string_view group) {
  const std::vector<Candidate> all = candidates_of(op), of_group = candidates_of(op, group);
  if (!of_group.empty()) return of_group[0];
  EXPECT_EQ(all.size(), 1u) << "no candidate " << group;
  return all.at(0);
}

}  // namespace tandem::test

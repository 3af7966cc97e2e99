// Names of a checkpoint's files and tensors.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "engine/parallel/sharded/sharded_state.h"

namespace tandem {

constexpr const char* kLayout = "layout";  ///< metadata of residuals
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

/// Tensors of every parameter, named with a prefix.
struct Section {
  std::string prefix;
  Moment moment;
  int learner = 0;  ///< whose ranks write it, and read it unless it is of all learners
};
const Section kWeights{"", Moment::weights}, kFirst{"m.", Moment::first},
    kSecond{"v.", Moment::second}, kMaster{"w.", Moment::master};

/// State that all learners have, of which the first has the file's.
const Section kAnchor{"", Moment::anchor}, kOuterMomentum{"outer.", Moment::outer_momentum};

/// Weights, moments and, of `outer`, what was sent in an exchange that may run meanwhile and what
/// messages have left out, of one of several learners.
inline std::vector<Section> learner_sections(int learner, const std::vector<Moment>& outer) {
  const std::string prefix = fmt::format("learner.{}.", learner);
  std::vector<Section> sections{{prefix, Moment::weights, learner},
                                {prefix + kFirst.prefix, Moment::first, learner},
                                {prefix + kSecond.prefix, Moment::second, learner}};
  for (const Moment moment : outer) {
    if (moment == Moment::sent) sections.push_back({prefix + "sent.", moment, learner});
    if (moment == Moment::unsent) sections.push_back({prefix + "unsent.", moment, learner});
  }
  return sections;
}

/// Tensor of a rank's residuals.
inline std::string rank_name(int rank) {
  return fmt::format("rank.{}", rank);
}

}  // namespace tandem

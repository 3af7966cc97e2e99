// Names of a checkpoint's files and tensors.
#pragma once

#include <fmt/format.h>

#include <string>

#include "engine/parallel/sharded/sharded_state.h"

namespace tandem {

constexpr const char* kLayout = "layout";  ///< metadata of residuals
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

/// Tensors of every parameter, named with a prefix.
struct Section {
  std::string prefix;
  Moment moment;
};
const Section kWeights{"", Moment::weights}, kFirst{"m.", Moment::first},
    kSecond{"v.", Moment::second}, kMaster{"w.", Moment::master};

/// Tensor of a rank's residuals.
inline std::string rank_name(int rank) {
  return fmt::format("rank.{}", rank);
}

}  // namespace tandem

// Rotary embedding of a model's layers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/model/config.h"
#include "kernels/rope.h"

namespace tandem {

/// Tables of the model's layers, with attention_multiplier in their lengths.
class RopeTables {
 public:
  RopeTables(const Exec& exec, int64_t max_seq, const ModelConfig& config);
  /// `rotates`: program::Op::rotates of the layer's attention.
  const RopeTable& of(bool rotates) const { return rotates ? rotating_ : *still_; }

 private:
  RopeTable rotating_;
  std::optional<RopeTable> still_;  ///< of layers without rotation
};

/// Position in a head of the model of each feature of a head that attention rotates by halves;
/// empty if it is the same.
std::vector<int32_t> rotary_order(const ModelConfig& config);
std::vector<int32_t> inverse_order(const std::vector<int32_t>& order);

}  // namespace tandem

// Rotary embedding of a model's layers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/program/program.h"
#include "kernels/rope.h"

namespace tandem {

/// Tables of the model's layers, with attention_multiplier in their lengths.
class RopeTables {
 public:
  RopeTables(const Exec& exec, int64_t max_seq, const ModelConfig& config);
  /// Bytes of memory of such tables.
  static double bytes(int64_t max_seq, const ModelConfig& config);
  /// `rotation`: of a layer of the model.
  const RopeTable& of(program::Rotation rotation) const { return *tables_[size_t(rotation)]; }

 private:
  std::array<std::optional<RopeTable>, program::kNumRotations> tables_;
};

/// Position in a head of the model of each feature of a head that attention rotates by halves;
/// empty if it is the same.
std::vector<int32_t> rotary_order(const ModelConfig& config);
std::vector<int32_t> inverse_order(const std::vector<int32_t>& order);

}  // namespace tandem

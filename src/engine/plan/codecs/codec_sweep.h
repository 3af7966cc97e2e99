// `tandem eval --codec-sweep`: cost of each wire format in bits per byte, and its savings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/run/training_record.h"
#include "engine/model/config.h"
#include "tandem/codec.h"

namespace tandem {

/// Formats of a sweep: every codec with several group sizes, "none" first.
std::vector<Wire> sweep_wires();

struct SweepPoint {
  Wire wire;
  double bits_per_byte = 0;
};

struct Sweep {
  std::vector<SweepPoint> points;  ///< the first without a codec
  ModelConfig model;
  std::vector<std::string> sites;  ///< sites with the format
  int ranks = 2;
  DType dtype = DType::f32;
  int64_t bytes = 0;                       ///< size of the text
  std::optional<TrainingRecord> training;  ///< if the run's files are found next to the model

  double rise(const SweepPoint& point) const {
    return point.bits_per_byte / points.front().bits_per_byte - 1;
  }
  /// Bytes sent by one rank per token, by SentBytes.
  double bytes_per_token(const SweepPoint& point) const;
  std::string table() const;  ///< Markdown
  std::string json() const;
  std::string svg() const;  ///< rise over bytes per token
};

}  // namespace tandem

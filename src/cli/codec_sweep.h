// `tandem eval --codec-sweep`: what each wire format costs in bits per byte, and what it saves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/training_record.h"
#include "engine/model/config.h"
#include "tandem/codec.h"

namespace tandem::cli {

/// The formats of a sweep: every codec in several groups. First none.
std::vector<Wire> sweep_wires();

struct SweepPoint {
  Wire wire;
  double bits_per_byte = 0;
};

struct Sweep {
  std::vector<SweepPoint> points;  ///< the first without a codec
  ModelConfig model;
  std::vector<std::string> sites;  ///< that have the format
  int ranks = 2;
  DType dtype = DType::f32;
  int64_t bytes = 0;                       ///< of text
  std::optional<TrainingRecord> training;  ///< where the run still stands beside the model

  double rise(const SweepPoint& point) const {
    return point.bits_per_byte / points.front().bits_per_byte - 1;
  }
  /// That one rank sends for a token, as SentBytes counts it.
  double bytes_per_token(const SweepPoint& point) const;
  std::string table() const;  ///< Markdown
  std::string json() const;
  std::string svg() const;  ///< rise over bytes per token
};

}  // namespace tandem::cli

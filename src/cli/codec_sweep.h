// `tandem eval --codec-sweep`: what each wire format costs in bits per byte, and what it saves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "tandem/codec.h"

namespace tandem::cli {

/// The formats of a sweep: every codec, integers in several groups. First none.
std::vector<Wire> sweep_wires();

struct SweepPoint {
  Wire wire;
  double bits_per_byte = 0;
};

struct Sweep {
  std::vector<SweepPoint> points;  ///< the first without a codec
  ModelConfig model;
  int ranks = 2;
  DType dtype = DType::f32;
  int64_t bytes = 0;  ///< of text

  double rise(const SweepPoint& point) const {
    return point.bits_per_byte / points.front().bits_per_byte - 1;
  }
  /// That one rank sends for a token: the partial products of both sites, in all layers.
  double bytes_per_token(const SweepPoint& point) const;
  std::string table() const;  ///< Markdown
  std::string json() const;
  std::string svg() const;  ///< rise over bytes per token
};

}  // namespace tandem::cli

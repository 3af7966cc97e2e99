// Scaling of rotary frequencies for contexts longer than a model was first trained on, as Hugging
// Face's rope_scaling names and computes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct RopeScaling {
  RopeScaling() {}  // not defaulted: GCC 12 takes the string of an aggregate for uninitialized
  /// "default": none; "linear": all frequencies / factor; "dynamic": NTK-aware, which differs from
  /// none only beyond the model's longest sequence; "llama3": long wavelengths / factor, with a
  /// smooth transition (Llama 3.1); "yarn": arXiv 2309.00071, 3.2 and 3.4.
  std::string type = "default";
  double factor = 1;
  double original_max_seq = 0;                       ///< llama3, yarn: positions before scaling
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3: original_max_seq / wavelength
  double beta_fast = 32, beta_slow = 1;              ///< yarn: rotations in original_max_seq
  bool truncate = true;         ///< yarn: the ramp begins and ends at whole pairs
  double attention_factor = 1;  ///< yarn: factor of cosines and sines
  bool is_none() const { return type == "default"; }
  bool operator==(const RopeScaling&) const = default;
};

/// Angle per position of each of the head_dim / 2 pairs of a head. Throws InvalidArgument for
/// another type.
std::vector<double> rope_frequencies(int64_t head_dim, double theta, const RopeScaling& scaling);

}  // namespace tandem

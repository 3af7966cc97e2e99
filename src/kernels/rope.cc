#include "kernels/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tandem/error.h"

namespace tandem {
namespace {

/// Llama 3.1: keeps short wavelengths, divides long ones, interpolates between them.
double llama3_frequency(double frequency, const RopeScaling& s) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength < s.original_max_seq / s.high_freq_factor) return frequency;
  if (wavelength > s.original_max_seq / s.low_freq_factor) return frequency / s.factor;
  const double share = (s.original_max_seq / wavelength - s.low_freq_factor) /
                       (s.high_freq_factor - s.low_freq_factor);
  return (1 - share) * frequency / s.factor + share * frequency;
}

/// Pair that turns `rotations` times within the original context (arXiv 2309.00071, 3.2).
double correction_pair(double rotations, double head_dim, double theta, const RopeScaling& s) {
  return head_dim * std::log(s.original_max_seq / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(theta));
}

void scale_yarn(std::vector<double>& frequencies, double head_dim, double theta,
                const RopeScaling& s) {
  double low = correction_pair(s.beta_fast, head_dim, theta, s);
  double high = correction_pair(s.beta_slow, head_dim, theta, s);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double scaled = std::clamp((double(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= scaled / s.factor + 1 - scaled;
  }
}

}  // namespace

std::vector<double> rope_frequencies(int64_t head_dim, double theta, const RopeScaling& scaling) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    frequencies.push_back(std::pow(theta, -2.0 * double(i) / double(head_dim)));
  }
  const auto& type = scaling.type;
  if (type == "linear") {
    for (double& frequency : frequencies) frequency /= scaling.factor;
  } else if (type == "llama3") {
    for (double& frequency : frequencies) frequency = llama3_frequency(frequency, scaling);
  } else if (type == "yarn") {
    scale_yarn(frequencies, double(head_dim), theta, scaling);
  } else if (type != "dynamic" && !scaling.is_none()) {
    throw InvalidArgument("rotary scaling '" + type +
                          "': expected default, linear, dynamic, llama3 or yarn");
  }
  return frequencies;
}

RopeTable::RopeTable(const Exec& exec, int64_t max_seq, int64_t head_dim, double theta,
                     const RopeScaling& scaling, const RopeShare& share)
    : half_(head_dim / 2),
      memory_(size_t(2 * max_seq * half_) * sizeof(float), exec.device),
      cos_(memory_.view(DType::f32, {max_seq, half_})),
      sin_(memory_.view(DType::f32, {max_seq, half_}, cos_.bytes())) {
  const Memory staging(exec.on_gpu() ? memory_.bytes() : 0);
  auto* const cosines = reinterpret_cast<float*>((exec.on_gpu() ? staging : memory_).data());
  float* const sines = cosines + max_seq * half_;
  const std::vector<double> frequencies =
      rope_frequencies(share.rotary_dim < 0 ? head_dim : share.rotary_dim, theta, scaling);
  const double rotated = scaling.type == "yarn" ? scaling.attention_factor : 1.0;
  for (int64_t i = 0; i < half_; ++i) {
    const bool rotates = i < int64_t(frequencies.size());
    const double frequency = rotates ? frequencies[size_t(i)] : 0,
                 length = share.length * (rotates ? rotated : 1);
    for (int64_t position = 0; position < max_seq; ++position) {
      cosines[position * half_ + i] = float(length * std::cos(double(position) * frequency));
      sines[position * half_ + i] = float(length * std::sin(double(position) * frequency));
    }
  }
  if (!exec.on_gpu()) return;
  const std::initializer_list<int64_t> all{2 * max_seq * half_};
  copy(exec, staging.view(DType::f32, all), memory_.view(DType::f32, all));
}

}  // namespace tandem

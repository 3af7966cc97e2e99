// Weight in 8 bits for inference (weight-only quantization): consecutive inputs of a row share a
// scale, and a weight is its code times that scale. Each code is read once a product.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/tensor.h"

namespace tandem {

/// int8: whole numbers up to 127; e4m3: Float8E4M3, relative precision.
enum class WeightFormat : uint8_t { int8, e4m3 };

constexpr std::string_view name_of(WeightFormat format) {
  return format == WeightFormat::int8 ? "int8" : "e4m3";
}
/// Consecutive inputs of a row that share a scale.
constexpr int64_t group_of(WeightFormat format) {
  return format == WeightFormat::int8 ? 64 : 128;
}
constexpr DType scale_dtype(WeightFormat format) {
  return format == WeightFormat::int8 ? DType::bf16 : DType::f32;
}
/// Bytes of a weight with its share of a scale.
constexpr double bytes_per_weight(WeightFormat format) {
  return 1 + double(size_of(scale_dtype(format))) / double(group_of(format));
}
/// "none", and the formats' names.
std::vector<std::string> weight_format_names();
/// Format of that name, or nullopt for "none". Throws InvalidArgument, which lists the names.
std::optional<WeightFormat> parse_weight_format(std::string_view name);

/// Memory of a coded weight. On the CPU codes are u8 [rows, groups x group], 0 after `columns`, and
/// scales [rows, groups]; on a GPU as gemm/cuda/coded_layout.h has them.
struct CodedMatrix {
  WeightFormat format;
  int64_t rows, columns;
  Tensor codes, scales;

  int64_t groups() const { return (columns + group_of(format) - 1) / group_of(format); }
};

struct CodedOptions {
  int64_t first_row = 0;    ///< first of the weight's rows that are multiplied; 0 on GPUs
  bool accumulate = false;  ///< out += instead of out =
};

class CodedWeight {
 public:
  /// Zeros, [rows, columns], on exec's device. Throws Unsupported on a GPU before Hopper.
  CodedWeight(const Exec& exec, WeightFormat format, int64_t rows, int64_t columns);

  /// Quantizes `weight`, f32 [rows, columns], contiguous, finite, on exec's device. With a group's
  /// max magnitude M a scale is M / 127, rounded up to bf16, and a code the nearest multiple: the
  /// error is at most half a scale. In e4m3 a scale is M / 448, at least 2^-126, and a code the
  /// nearest number: the error is at most a sixteenth of the weight, or 2^-10 scales. A group does
  /// not depend on others. CPUs and GPUs make the same codes and scales.
  void quantize(const Exec& exec, const Tensor& weight);

  /// out[M, n] = x[M, K] x rows [first_row, first_row + n) of the weight^T; contiguous rows. A row
  /// has the same bits however many other rows there are. Throws InvalidArgument naming the operand
  /// that does not fit.
  ///
  /// On a CPU x and out are f32 or bf16. Scale x code, rounded to f32 (exact in int8), times x is
  /// added in f32, in 16 sums over k.
  ///
  /// On a GPU M is at most kMaxFewRows, x bf16 with K and its stride multiples of 8, out f32 or
  /// bf16. Tensor cores add x times the codes of 64 inputs in f32, 16 at a time; then the sum over
  /// these, in order, takes scale x theirs with one rounding. k is divided among up to 8 blocks, by
  /// the weight's shape only, whose sums are added in order. The codes may be read before the calls
  /// enqueued before this one have ended.
  void multiply(const Exec& exec, const Tensor& x, const Tensor& out,
                const CodedOptions& options = {}) const;

  /// out[M, F] = silu(x gate^T) * (x up^T) for a weight [gate | up], [2 F, K], with the bits of
  /// multiply in out's dtype and swiglu_forward. False, and nothing is done, if there is no such
  /// kernel: for all but up to kMaxFewRows rows, to bf16, by a multiple of 8 rows of the weight, on
  /// a GPU.
  bool multiply_swiglu(const Exec& exec, const Tensor& x, const Tensor& out) const;

  /// Writes scale x code: f32 [rows, columns], contiguous, on a GPU also bf16, on exec's device.
  void read(const Exec& exec, const Tensor& to) const;
  /// Bytes of memory.
  size_t bytes() const { return codes_.bytes() + scales_.bytes(); }

 private:
  Memory codes_, scales_;
  CodedMatrix matrix_;
};

}  // namespace tandem

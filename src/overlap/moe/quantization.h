// Experts whose GEMMs multiply e4m3 rows with a scale each (codec/quantize.h), on CPU ranks. A rank
// quantizes its rows, and sends codes and scale: hidden + 4 bytes a row. Experts multiply these
// codes, by the weights' in both passes. Weight gradients are GEMMs of the rows' values.
#pragma once

#include <functional>

#include "codec/quantize.h"
#include "schedule/moe.h"

namespace tandem {

/// Outlives the layer (MoeOptions::quantization).
struct MoeQuantization {
  /// Codes of a weight of all local experts, w_in or w_out, by rows; `is_transposed`: of each
  /// expert's transpose, one below the other. Called in every pass, for weights that the passes of
  /// a step may share. Must not communicate.
  std::function<QuantizedRows(const Tensor& weight, bool is_transposed)> weight;
  bool has_scales = true;  ///< if false, codes are the values rounded: a control
};

/// Codes of a weight of several experts, [experts x rows, columns], by rows, and of each expert's
/// transpose.
class QuantizedExperts {
 public:
  /// Memory of a weight of that shape.
  QuantizedExperts(int64_t experts, int64_t rows, int64_t columns);
  void quantize(const Tensor& weight, bool has_scales);
  QuantizedRows rows(bool is_transposed) const;

 private:
  int64_t experts_, rows_, columns_;
  Memory memory_;  ///< both forms' scales, then both forms' codes
};
/// Quantization of weights that do not change.
class FixedQuantization {
 public:
  /// w_in: [experts x 2 ffn, hidden]; w_out: [experts x hidden, ffn].
  FixedQuantization(const Tensor& w_in, const Tensor& w_out, int64_t experts, bool has_scales);
  FixedQuantization(const FixedQuantization&) = delete;
  FixedQuantization& operator=(const FixedQuantization&) = delete;
  const MoeQuantization& quantization() const { return quantization_; }

 private:
  QuantizedExperts in_, out_;
  MoeQuantization quantization_;
};
/// Bytes of QuantizedExperts.
size_t quantized_experts_bytes(int64_t experts, int64_t rows, int64_t columns);

/// Without `has_scales`, codes are the values rounded.
void quantize(const Tensor& x, const QuantizedRows& to, bool has_scales);

/// Bytes of a row of `hidden` values as it is sent: its codes, then its scale.
constexpr int64_t packed_row_bytes(int64_t hidden) {
  return hidden + int64_t(sizeof(float));
}
/// Rows as they are sent, e4m3 [rows, packed_row_bytes].
void pack(const QuantizedRows& rows, const Tensor& packed);
void unpack(const Tensor& packed, const QuantizedRows& rows);

QuantizedRows rows_of(const QuantizedRows& all, int64_t begin, int64_t count);
inline QuantizedRows rows_of(const QuantizedRows& all, schedule::Range range) {
  return rows_of(all, range.begin, range.count);
}

}  // namespace tandem

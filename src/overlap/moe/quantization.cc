#include "overlap/moe/quantization.h"

#include <cstring>

namespace tandem {

size_t quantized_experts_bytes(int64_t experts, int64_t rows, int64_t columns) {
  return size_t(experts) * (size_t(rows + columns) * sizeof(float) + 2 * size_t(rows * columns));
}

QuantizedExperts::QuantizedExperts(int64_t experts, int64_t rows, int64_t columns)
    : experts_(experts),
      rows_(rows),
      columns_(columns),
      memory_(quantized_experts_bytes(experts, rows, columns)) {}

QuantizedRows QuantizedExperts::rows(bool is_transposed) const {
  const int64_t rows = experts_ * (is_transposed ? columns_ : rows_),
                columns = is_transposed ? rows_ : columns_;
  auto* const scales = static_cast<std::byte*>(memory_.data());
  std::byte* const codes = scales + size_t(experts_ * (rows_ + columns_)) * sizeof(float);
  const size_t other = is_transposed ? size_t(experts_ * rows_) : 0;
  return {Tensor(codes + other * size_t(columns_), DType::e4m3, {rows, columns}),
          Tensor(scales + other * sizeof(float), DType::f32, {rows})};
}

void QuantizedExperts::quantize(const Tensor& weight, bool has_scales) {
  tandem::quantize(weight, rows(false), has_scales);
  for (int64_t expert = 0; expert < experts_; ++expert) {
    tandem::quantize(weight.rows(expert * rows_, rows_).transposed(),
                     rows_of(rows(true), expert * columns_, columns_), has_scales);
  }
}

FixedQuantization::FixedQuantization(const Tensor& w_in, const Tensor& w_out, int64_t experts,
                                     bool has_scales)
    : in_(experts, w_in.dim(0) / experts, w_in.dim(1)),
      out_(experts, w_out.dim(0) / experts, w_out.dim(1)),
      quantization_{[this, in = w_in.data()](const Tensor& weight, bool is_transposed) {
                      return (weight.data() == in ? in_ : out_).rows(is_transposed);
                    },
                    has_scales} {
  in_.quantize(w_in, has_scales);
  out_.quantize(w_out, has_scales);
}

void quantize(const Tensor& x, const QuantizedRows& to, bool has_scales) {
  has_scales ? quantize_rows_on_cpu(x, to.codes, to.scales)
             : round_rows_on_cpu(x, to.codes, to.scales);
}

void pack(const QuantizedRows& rows, const Tensor& packed) {
  const auto hidden = size_t(rows.codes.dim(1)), bytes = size_t(packed.dim(1));
  for (size_t row = 0; row < size_t(packed.dim(0)); ++row) {
    auto* const to = packed.as<std::byte>() + row * bytes;
    std::memcpy(to, rows.codes.as<std::byte>() + row * hidden, hidden);
    std::memcpy(to + hidden, rows.scales.as<float>() + row, sizeof(float));
  }
}

void unpack(const Tensor& packed, const QuantizedRows& rows) {
  const auto hidden = size_t(rows.codes.dim(1)), bytes = size_t(packed.dim(1));
  for (size_t row = 0; row < size_t(packed.dim(0)); ++row) {
    const auto* const from = packed.as<std::byte>() + row * bytes;
    std::memcpy(rows.codes.as<std::byte>() + row * hidden, from, hidden);
    std::memcpy(rows.scales.as<float>() + row, from + hidden, sizeof(float));
  }
}

QuantizedRows rows_of(const QuantizedRows& all, int64_t begin, int64_t count) {
  return {all.codes.rows(begin, count), all.scales.narrow(0, begin, count)};
}

}  // namespace tandem

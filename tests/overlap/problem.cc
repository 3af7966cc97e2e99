#include "tests/overlap/problem.h"

#include <cstring>
#include <vector>

#include "tandem/random.h"

namespace tandem::test {

Matrix::Matrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed, bool transposed,
               int64_t padding) {
  const int64_t num_outer = transposed ? columns : rows, length = transposed ? rows : columns;
  memory_ = Memory(size_t(num_outer * (length + padding)) * size_of(dtype));
  const Tensor all = memory_.view(dtype, {num_outer, length + padding});
  const Tensor narrow = all.narrow(1, 0, length);
  tensor_ = transposed ? narrow.transposed() : narrow;
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t i = 0; i < rows; ++i) {
    fill_normal(row, seed, uint64_t(i));
    for (int64_t j = 0; j < columns; ++j) {
      const float value = row[size_t(j)];
      const int64_t offset = i * tensor_.stride(0) + j * tensor_.stride(1);
      if (dtype == DType::f32) {
        tensor_.as<float>()[offset] = value;
      } else if (dtype == DType::e4m3) {
        tensor_.as<Float8E4M3>()[offset] = Float8E4M3::from_float(value);
      } else {
        tensor_.as<BFloat16>()[offset] = BFloat16::from_float(value);
      }
    }
  }
}

double at(const Tensor& t, int64_t row, int64_t column) {
  const int64_t offset = row * t.stride(0) + column * t.stride(1);
  if (t.dtype() == DType::f32) return double(t.as<float>()[offset]);
  if (t.dtype() == DType::e4m3) return double(t.as<Float8E4M3>()[offset].to_float());
  return double(t.as<BFloat16>()[offset].to_float());
}

double Matrix::at(int64_t row, int64_t column) const {
  return test::at(tensor_, row, column);
}

Matrix as_sent(const Communicator& comm, const Wire& wire, const Tensor& x) {
  const int64_t columns = x.dim(1);
  Matrix sent(x.dtype(), x.dim(0), columns, 0);
  const Wire as = comm.size() == 1 ? Wire{} : wire;
  std::vector<std::byte> message(as.bytes(columns, x.dtype()));
  for (int64_t row = 0; row < x.dim(0) && columns > 0; ++row) {
    const Tensor from(x.rows(row, 1).data(), x.dtype(), {columns});
    const Tensor to(sent.tensor().rows(row, 1).data(), x.dtype(), {columns});
    encode(as, from, message);
    decode(as, message, to);
  }
  return sent;
}

Tensor Matrix::vector() const {
  return Tensor(tensor_.data(), tensor_.dtype(), {tensor_.dim(1)});
}

namespace {
// Error of accumulation in f32 in any order, relative to the sum of the terms' magnitudes.
AccumulationError accumulation(int64_t terms) {
  return {double(terms + 12) * 0x1p-24, 0};
}
}  // namespace

void Expected::add_partial(const Expected& partial, int64_t terms, DType wire) {
  value += partial.value;
  magnitude += partial.magnitude;
  rounding.add_partial(partial.value, partial.magnitude, accumulation(terms), wire, true);
}

double Expected::bound(int64_t terms, DType wire, int running_roundings, DType out) const {
  ErrorBound all = rounding;
  all.round_running(running_roundings, wire);
  all.add_partial(0, magnitude, accumulation(terms), out, false);
  all.round(value, out);
  return all.error();
}

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  const size_t outer = size_t(tensor.dim(1)) * size_of(tensor.dtype());
  std::vector<std::byte> bytes(size_t(tensor.dim(0)) * outer);
  for (int64_t row = 0; row < tensor.dim(0) && outer; ++row) {
    std::memcpy(bytes.data() + size_t(row) * outer, tensor.rows(row, 1).data(), outer);
  }
  return bytes;
}

}  // namespace tandem::test

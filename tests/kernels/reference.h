// References of the kernel tests: seeded data, tensors that own their memory, and central
// differences of a double-precision function.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <vector>

#include "tandem/random.h"
#include "tandem/tensor.h"

namespace tandem::test {

using Doubles = std::vector<double>;

/// A tensor and its memory; rows may be strided.
struct Matrix {
  Matrix(DType dtype, int64_t rows, int64_t columns, int64_t row_stride = 0)
      : buffer(size_t(rows * std::max(columns, row_stride)) * size_of(dtype)) {
    if (row_stride == 0) row_stride = columns;
    const Tensor whole = buffer.view(dtype, {rows, row_stride});
    // Columns [0, columns) of each row.
    tensor = Tensor(whole.transposed().rows(0, columns).transposed());
  }
  Memory buffer;
  Tensor tensor;

  double get(int64_t row, int64_t column) const {
    const int64_t i = row * tensor.stride(0) + column;
    return tensor.dtype() == DType::f32 ? double(tensor.as<float>()[i])
                                        : double(tensor.as<BFloat16>()[i].to_float());
  }
  void set(int64_t row, int64_t column, double value) {
    const int64_t i = row * tensor.stride(0) + column;
    if (tensor.dtype() == DType::f32) {
      tensor.as<float>()[i] = float(value);
    } else {
      tensor.as<BFloat16>()[i] = BFloat16::from_float(float(value));
    }
  }
  Doubles values() const {
    Doubles all;
    for (int64_t i = 0; i < tensor.dim(0); ++i) {
      for (int64_t j = 0; j < tensor.dim(1); ++j) all.push_back(get(i, j));
    }
    return all;
  }
  /// Fills with normal numbers times `scale`.
  Matrix& fill(const char* name, double scale = 1) {
    for (int64_t i = 0; i < tensor.dim(0); ++i) {
      for (int64_t j = 0; j < tensor.dim(1); ++j) {
        set(i, j, scale * double(normal(11, stream_of(name), uint64_t(i * tensor.dim(1) + j))));
      }
    }
    return *this;
  }
};

/// max |a - b| / (max |b| + tiny).
inline double relative_error(const Doubles& a, const Doubles& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, size = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::isnan(a[i]) ? INFINITY : std::fabs(a[i] - b[i]));
    size = std::max(size, std::fabs(b[i]));
  }
  return difference / size;
}

/// d f / d x, by central differences.
inline Doubles numeric_gradient(Doubles x, const std::function<double(const Doubles&)>& f) {
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double center = x[i], step = 1e-5;
    x[i] = center + step;
    const double above = f(x);
    x[i] = center - step;
    gradient[i] = (above - f(x)) / (2 * step);
    x[i] = center;
  }
  return gradient;
}

inline double dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Tolerated rounding error of `dtype`, relative to the largest element.
inline double tolerance(DType dtype) {
  return dtype == DType::f32 ? 5e-6 : 1e-2;
}

}  // namespace tandem::test

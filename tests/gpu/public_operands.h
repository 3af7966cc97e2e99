// Ranks and tensors for tests of the public interface on GPUs, which use nothing else of Tandem.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/cuda.h"
#include "tandem/dtype.h"
#include "tandem/random.h"
#include "tandem/tensor.h"
#include "tests/gpu/gpu_count.h"

namespace tandem::test {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class OnGpuRanks : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(GetParam())) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
  }
  int ranks() const { return GetParam(); }
  bool shares_gpu() const { return ranks_per_gpu(ranks()) > 1; }
  void run(const std::function<void(Communicator&)>& body) const {
    run_gpus({ranks(), {}, 20, ranks_per_gpu(ranks())}, body);
  }
};

/// Copies in the order of the communicator's stream. Blocks.
inline void copy(Communicator& comm, void* to, const void* from, size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(comm)));
  synchronize(comm);
}

/// Matrix in a rank's memory.
struct OnDevice {
  OnDevice(Communicator& rank, DType dtype, int64_t rows, int64_t columns)
      : comm(rank),
        memory(size_t(rows * columns) * size_of(dtype), device_of(rank)),
        tensor(memory.view(dtype, {rows, columns})) {}
  /// Makes a tensor of `values`, which its dtype represents exactly.
  OnDevice(Communicator& rank, DType dtype, int64_t rows, int64_t columns,
           const std::vector<float>& values)
      : OnDevice(rank, dtype, rows, columns) {
    write(values);
  }
  void write(const std::vector<float>& values) const {
    if (tensor.dtype() == DType::f32)
      return copy(comm, memory.data(), values.data(), tensor.bytes());
    std::vector<BFloat16> bits;
    for (const float value : values) bits.push_back(BFloat16::from_float(value));
    copy(comm, memory.data(), bits.data(), tensor.bytes());
  }
  void write(const std::vector<int>& values) const {
    copy(comm, memory.data(), values.data(), tensor.bytes());
  }
  /// Sets every byte to 0xff: NaN.
  void poison() const {
    check(cudaMemsetAsync(memory.data(), 0xff, memory.bytes(), stream_of(comm)));
  }
  std::vector<float> read() const { return read_from(comm, tensor); }
  static std::vector<float> read_from(Communicator& comm, const Tensor& tensor) {
    std::vector<float> values(size_t(tensor.elements()));
    if (tensor.dtype() == DType::f32) {
      copy(comm, values.data(), tensor.data(), tensor.bytes());
      return values;
    }
    std::vector<BFloat16> bits(values.size());
    copy(comm, bits.data(), tensor.data(), tensor.bytes());
    for (size_t i = 0; i < bits.size(); ++i) values[i] = bits[i].to_float();
    return values;
  }

  Communicator& comm;
  Memory memory;
  Tensor tensor;
};

/// Reads i32 rows.
inline std::vector<int> read_ints(Communicator& comm, const Tensor& tensor) {
  std::vector<int> values(size_t(tensor.elements()));
  copy(comm, values.data(), tensor.data(), tensor.bytes());
  return values;
}

/// Elements -1, 0 and 1: sums of some thousand of their products are below 256, which every dtype
/// represents exactly, and so are all partial sums in any order.
inline std::vector<float> small_numbers(uint64_t stream, int64_t count) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(float(int(philox(3, stream, uint64_t(i))[0] % 3) - 1));
  }
  return values;
}

/// Rows [first, first + count) of `columns` columns.
inline std::vector<float> rows_of(const std::vector<float>& matrix, int64_t columns, int64_t first,
                                  int64_t count) {
  return {matrix.begin() + first * columns, matrix.begin() + (first + count) * columns};
}

inline std::vector<float> transposed(const std::vector<float>& matrix, int64_t columns) {
  const int64_t rows = int64_t(matrix.size()) / columns;
  std::vector<float> turned(matrix.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j)
      turned[size_t(j * rows + i)] = matrix[size_t(i * columns + j)];
  }
  return turned;
}

/// sum += x[m, k] x weight[n, k]^T.
inline void add_product(std::vector<float>& sum, const std::vector<float>& x,
                        const std::vector<float>& weight, int64_t k) {
  const auto m = int64_t(x.size()) / k, n = int64_t(weight.size()) / k;
  sum.resize(size_t(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float element = 0;
      for (int64_t l = 0; l < k; ++l) element += x[size_t(i * k + l)] * weight[size_t(j * k + l)];
      sum[size_t(i * n + j)] += element;
    }
  }
}

}  // namespace tandem::test

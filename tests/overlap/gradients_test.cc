// The operators are each other's backward passes. y = all-gather(x) w^T, loss = sum of y * c:
// dx = reduce-scatter of c w (GEMM+RS with the weight transposed), dw = c^T all-gather(x).
// z = reduce-scatter(u v^T): du = all-gather(dz) v (AG+GEMM), dv = all-gather(dz)^T u.
#include <algorithm>
#include <cmath>

#include "gemm/gemm.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

class Gradients : public OnRanks {};

constexpr int64_t kM = 11, kN = 6, kK = 5;

double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.dim(0); ++i) {
    for (int64_t j = 0; j < a.dim(1); ++j) sum += at(a, i, j) * at(b, i, j);
  }
  return sum;
}

double sum_over_ranks(Communicator& comm, double value) {
  double sum = 0;
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(&value, 1)), "loss")) {
    sum += *reinterpret_cast<const double*>(blob.data());
  }
  return sum;
}

/// (loss(at + step) - loss(at - step)) / (2 step) for the element of one rank; linear functions
/// have no truncation error, so a large step keeps rounding small.
template <typename Loss>
double slope(Communicator& comm, const Tensor& t, int64_t i, int64_t j, int owner,
             const Loss& loss) {
  constexpr float kStep = 1.0f;
  float* const element = t.as<float>() + i * t.stride(0) + j * t.stride(1);
  const bool local = comm.rank() == owner && i < t.dim(0) && j < t.dim(1);
  const float old = local ? *element : 0;
  if (local) *element = old + kStep;
  const double up = sum_over_ranks(comm, loss());
  if (local) *element = old - kStep;
  const double down = sum_over_ranks(comm, loss());
  if (local) *element = old;
  return (up - down) / (2 * double(kStep));
}

TEST_P(Gradients, AgGemmMatchesDifferences) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const uint64_t rank = uint64_t(comm.rank());
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    const Matrix x(DType::f32, local.count, kK, 1 + rank), w(DType::f32, kN, kK, 20 + rank);
    const Matrix c(DType::f32, kM, kN, 40 + rank), y(DType::f32, kM, kN, 0);
    AgGemm forward(comm, {kM, kN, kK}, {Strategy::overlapped, 2});
    const auto loss = [&] {
      forward.run(x.tensor(), w.tensor(), y.tensor());
      return dot(y.tensor(), c.tensor());
    };
    GemmRs input_gradient(comm, {.m = kM, .n = kK, .k = kN, .weight_kn = true},
                          {Strategy::overlapped, 2});
    const Matrix dx(DType::f32, local.count, kK, 0);
    input_gradient.run(c.tensor(), w.tensor().transposed(), dx.tensor());
    AgWgrad weight_gradient(comm, {kM, kN, kK}, {Strategy::overlapped, 2});
    const Memory memory(size_t(kN * kK) * 4);
    const Tensor dw = memory.view(DType::f32, {kN, kK});
    weight_gradient.run(x.tensor(), c.tensor(), dw);
    for (int owner = 0; owner < comm.size(); ++owner) {
      for (const auto& [i, j] : {std::pair<int64_t, int64_t>{0, 0}, {1, 3}, {2, 4}}) {
        const double of_x = slope(comm, x.tensor(), i, j, owner, loss);
        const double of_w = slope(comm, w.tensor(), i, j, owner, loss);
        if (comm.rank() != owner) continue;
        if (i < local.count) {
          EXPECT_NEAR(at(dx.tensor(), i, j), of_x, 2e-4);
        }
        EXPECT_NEAR(at(dw, i, j), of_w, 2e-4);
      }
    }
  });
}

TEST_P(Gradients, GemmRsMatchesDifferences) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const uint64_t rank = uint64_t(comm.rank());
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    const Matrix u(DType::f32, kM, kK, 1 + rank), v(DType::f32, kN, kK, 20 + rank);
    const Matrix c(DType::f32, local.count, kN, 40 + rank), z(DType::f32, local.count, kN, 0);
    GemmRs forward(comm, {kM, kN, kK}, {Strategy::overlapped, 3});
    const auto loss = [&] {
      forward.run(u.tensor(), v.tensor(), z.tensor());
      return dot(z.tensor(), c.tensor());
    };
    // The gathered dz serves both gradients.
    AgGemm input_gradient(comm,
                          {.m = kM, .n = kK, .k = kN, .keep_gathered = true, .weight_kn = true},
                          {Strategy::overlapped, 3});
    const Matrix du(DType::f32, kM, kK, 0), dv(DType::f32, kN, kK, 0);
    input_gradient.run(c.tensor(), v.tensor().transposed(), du.tensor());
    gemm(input_gradient.gathered().transposed(), u.tensor(), dv.tensor());
    // A separate gather serves as well, with the other operand's gradient transposed.
    AgWgrad weight_gradient(comm, {.m = kM, .n = kK, .k = kN, .weight_kn = true},
                            {Strategy::overlapped, 2});
    const Matrix summed(DType::f32, kN, kK, 0);
    std::fill_n(summed.tensor().as<float>(), summed.tensor().elements(), 0.0f);
    weight_gradient.run(c.tensor(), u.tensor(), summed.tensor().transposed());
    for (int64_t i = 0; i < kN; ++i) {
      for (int64_t j = 0; j < kK; ++j) {
        EXPECT_NEAR(at(summed.tensor(), i, j), at(dv.tensor(), i, j), 1e-5);
      }
    }
    for (int owner = 0; owner < comm.size(); ++owner) {
      for (const auto& [i, j] : {std::pair<int64_t, int64_t>{0, 0}, {4, 3}, {5, 4}}) {
        const double of_u = slope(comm, u.tensor(), i, j, owner, loss);
        const double of_v = slope(comm, v.tensor(), i, j, owner, loss);
        if (comm.rank() != owner) continue;
        EXPECT_NEAR(at(du.tensor(), i, j), of_u, 2e-4);
        EXPECT_NEAR(at(dv.tensor(), i, j), of_v, 2e-4);
      }
    }
  });
}

TANDEM_INSTANTIATE(Gradients);

}  // namespace
}  // namespace tandem::test

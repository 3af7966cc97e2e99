// Fused kernels whose weight is stored [K, N]: the bits of the same candidate with [N, K].
#include <fmt/format.h>

#include <map>
#include <string>
#include <vector>

#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/scaled_operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class WeightKn : public OnGpus {
 protected:
  void SetUp() override {
    OnGpus::SetUp();
    if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  }
};

/// The weight [n, k] as a new matrix [k, n].
Matrix transposed(GpuCommunicator& comm, const OpDesc& shape, const Tensor& weight) {
  const auto nk = read<uint16_t>(comm, weight);
  std::vector<uint16_t> kn(nk.size());
  for (int64_t n = 0; n < shape.n; ++n) {
    for (int64_t k = 0; k < shape.k; ++k) {
      kn[size_t(k * shape.n + n)] = nk[size_t(n * shape.k + k)];
    }
  }
  Matrix matrix(shape.dtype, shape.k, shape.n);
  write(comm, matrix.tensor.data(), kn);
  return matrix;
}

template <class Op>
void expect_same_bits(GpuCommunicator& comm, const LtContext& lt, OpDesc shape,
                      const ScaledOperands& o, const std::string& name) {
  const Op nk_op(comm, lt, shape);
  std::map<std::string, std::vector<uint16_t>> expected;
  for (const Candidate& candidate : candidates_of(nk_op, "fused")) {
    candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor});
    expected[candidate.name] = read<uint16_t>(comm, o.out.tensor);
  }
  const Matrix weight = transposed(comm, shape, o.weight.tensor);
  shape.weight_kn = true;
  const Op kn_op(comm, lt, shape);
  const auto fused = candidates_of(kn_op, "fused");
  ASSERT_GT(fused.size(), 0u) << name;
  for (const Candidate& candidate : fused) {
    const std::string what =
        fmt::format("{} M {} N {} K {} {} {} of {}", name, shape.m, shape.n, shape.k,
                    tandem::name_of(shape.dtype), candidate.name, comm.size());
    poison(o.out.tensor, comm.stream());
    candidate.run({o.x.tensor, weight.tensor, o.out.tensor});
    ASSERT_TRUE(expected.contains(candidate.name)) << what;
    EXPECT_TRUE(read<uint16_t>(comm, o.out.tensor) == expected[candidate.name]) << what;
    expect_right(comm, o, what);
  }
}

TEST_P(WeightKn, FusedCandidatesHaveTheBitsOfTheOtherLayout) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const int64_t ranks = comm.size();
    const OpDesc shapes[] = {{512 * ranks, 520, 1096, DType::bf16},
                             {1024 * ranks, 1288, 2048, DType::bf16},
                             {512 * ranks, 264, 520, DType::f16},
                             {300 * ranks + 1, 776, 1000, DType::bf16},
                             {ranks, 72, 512, DType::f16}};
    for (const OpDesc& shape : shapes) {
      expect_same_bits<gpu::AgGemm>(comm, lt, shape, scaled_ag_operands(comm, shape, 3), "ag_gemm");
      expect_same_bits<gpu::GemmRs>(comm, lt, shape, scaled_sum_operands(comm, shape, true, 4),
                                    "gemm_rs");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, WeightKn, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test

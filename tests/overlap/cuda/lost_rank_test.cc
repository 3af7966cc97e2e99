// One rank omits a call that all others make: they time out at the deadline and name it. Then it
// makes the call, too late to accept a wrong result as right.
#include <fmt/format.h>

#include <atomic>
#include <cctype>
#include <chrono>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bench/cuda/verify.h"
#include "collectives/cuda/all_reduce.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;
using Clock = std::chrono::steady_clock;

constexpr double kDeadline_s = 0.4;  // for the calls under test
constexpr double kPatience_s = 20;   // for all other calls
constexpr int64_t kSamples = 20000;

enum class Kind { ag_gemm, gemm_rs, gemm_ar, ag_wgrad, all_reduce };
constexpr const char* kNames[] = {"ag_gemm", "gemm_rs", "gemm_ar", "ag_wgrad", "all_reduce"};

struct Case {
  Kind kind;
  const char* group;  // family, or candidate
  const char* name;   // in a family
  int64_t m;          // rows of a shard; all rows for GEMM+AR and all-reduce
  int64_t n, k;

  const char* op() const { return kNames[int(kind)]; }
  std::string what() const { return fmt::format("{} {} {}", op(), group, name); }
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << c.what() << " M " << c.m << " N " << c.n << " K " << c.k;
}

// First and last candidate of every family, and each transport of AG+GEMM. GEMM+RS
// by tiles also with several tiles a block, whose sender overlaps the GEMM, and serial kernels also
// with shards too large for one exchange.
constexpr Case kCases[] = {
    {Kind::ag_gemm, "fused", "256x160 local first 8/8", 512, 1000, 1032},
    {Kind::ag_gemm, "fused", "128x160 copy warps", 512, 1000, 1032},
    {Kind::ag_gemm, "fused", "128x256 in pairs, split local first 8/8", 512, 1000, 1032},
    {Kind::ag_gemm, "fused", "128x256 in pairs, split slow copy warps, a peer first", 512, 1000,
     1032},
    {Kind::ag_gemm, "chunked", "", 512, 1000, 1032},
    {Kind::ag_gemm, "serial_copy", "", 512, 1000, 1032},
    {Kind::ag_gemm, "serial_kernels", "", 64, 1000, 1032},
    {Kind::ag_gemm, "serial_kernels", "", 512, 1000, 1032},
    {Kind::gemm_rs, "fused_cutlass", "128x128, sending at 100 %", 512, 1000, 1032},
    {Kind::gemm_rs, "fused_cutlass", "128x128, sending unpaced", 1536, 3080, 520},
    {Kind::gemm_rs, "fused_cutlass", "128x256, sending at 30 %", 512, 1000, 1032},
    {Kind::gemm_rs, "fused_cutlass", "128x256, sending at 125 %", 1536, 3080, 520},
    {Kind::gemm_rs, "fused", "stored, local tiles last", 2304, 2048, 1096},
    {Kind::gemm_rs, "fused", "stored, one of 6 later", 2304, 2048, 1096},
    {Kind::gemm_rs, "fused", "shards in 4 chunks", 2304, 2048, 1096},
    {Kind::gemm_rs, "chunked", "", 512, 1000, 1032},
    {Kind::gemm_rs, "serial_copy", "", 512, 1000, 1032},
    {Kind::gemm_rs, "serial_kernels", "", 64, 1000, 1032},
    {Kind::gemm_rs, "serial_kernels", "", 512, 2056, 520},
    {Kind::gemm_ar, "fused", "64 tokens, cluster 2, one-shot", 64, 1000, 520},
    {Kind::gemm_ar, "fused", "64 tokens, cluster 2, two-shot", 64, 1000, 520},
    {Kind::gemm_ar, "fused", "64 tokens, cluster 2, split *, one-shot", 64, 520, 520},
    {Kind::gemm_ar, "fused", "64 tokens, cluster 2, split *, two-shot", 64, 520, 520},
    {Kind::gemm_ar, "one_shot", "", 64, 1000, 520},
    {Kind::gemm_ar, "two_shot", "", 64, 1000, 520},
    {Kind::ag_wgrad, "chunked", "", 512, 264, 1032},
    {Kind::all_reduce, "one_shot", "", 64, 4096, 0},
    {Kind::all_reduce, "two_shot", "", 64, 4096, 0}};

/// Whether a candidate has this name, in which one `*` stands for any text; "" for any name.
bool matches(std::string_view name, std::string_view pattern) {
  const size_t star = pattern.find('*');
  if (star == pattern.npos) return pattern.empty() || name == pattern;
  return name.size() + 1 >= pattern.size() && name.starts_with(pattern.substr(0, star)) &&
         name.ends_with(pattern.substr(star + 1));
}

// Operator with its operands on one rank.
class Call {
 public:
  virtual ~Call() = default;
  /// True if the operator has this candidate here.
  virtual bool exists() const = 0;
  /// Writes other values at the same addresses and clears the result.
  virtual void draw(uint64_t seed) = 0;
  virtual void run() = 0;
  virtual Verdict verdict() const = 0;
};

template <typename Op>
class DenseCall final : public Call {
  static constexpr bool kGathers = std::is_same_v<Op, AgGemm>;
  static constexpr bool kScatters = std::is_same_v<Op, GemmRs>;
  static constexpr bool kGradient = std::is_same_v<Op, AgWgrad>;
  static constexpr bool kLocalRows = kGathers || kGradient;  // x is sharded

 public:
  DenseCall(GpuCommunicator& comm, const OpDesc& shape, const Case& c)
      : comm_(comm),
        shape_(shape),
        op_(comm, lt_, shape),
        x_(shape.dtype, kLocalRows ? local().count : shape.m, shape.k),
        weight_(shape.dtype, kGradient ? shape.m : shape.n, kGradient ? shape.n : shape.k),
        out_(kGradient ? Matrix(DType::f32, shape.n, shape.k)
                       : Matrix(shape.dtype, kScatters ? local().count : shape.m, shape.n)) {
    for (const Candidate& candidate : candidates_of(op_, c.group)) {
      if (matches(candidate.name, c.name)) candidate_ = candidate;
    }
    // If there is a family, the test must name one of its candidates.
    EXPECT_EQ(exists(), !candidates_of(op_, c.group).empty()) << "none is called " << c.name;
  }
  bool exists() const override { return candidate_.run != nullptr; }

  void draw(uint64_t seed) override {
    const auto rank = uint64_t(comm_.rank());
    reference_ = reference(seed);
    fill_uniform(x_.tensor, seed, kLocalRows ? 100 : 100 + rank,
                 kLocalRows ? local().begin * shape_.k : 0, comm_.stream());
    fill_uniform(weight_.tensor, seed, kLocalRows ? 200 + rank : 201 + rank, 0, comm_.stream());
    if (!kGradient) return poison(out_.tensor, comm_.stream());
    gpu::check(cudaMemsetAsync(out_.tensor.data(), 0, out_.tensor.bytes(), comm_.stream()),
               "clear a gradient");
  }
  void run() override { candidate_.run({x_.tensor, weight_.tensor, out_.tensor}); }
  Verdict verdict() const override {
    return verify_product(out_.tensor, reference_, kSamples, comm_.stream());
  }

 private:
  Shard local() const { return shard_of(shape_.m, comm_.size(), comm_.rank()); }

  ProductReference reference(uint64_t seed) const {
    if (kGathers) return ag_reference(comm_, shape_, seed);
    if (!kGradient) return sum_reference(comm_, shape_, kScatters, seed);
    return {.seed = seed,
            .x_stream = 200 + uint64_t(comm_.rank()),
            .w_stream = 100,
            .terms = 1,
            .k = shape_.m,
            .first_row = 0,
            .dtype = shape_.dtype,
            .x_is_km = true,
            .w_is_kn = true};
  }

  GpuCommunicator& comm_;
  OpDesc shape_;
  LtContext lt_;
  Op op_;
  Candidate candidate_;
  Matrix x_, weight_, out_;  // for the weight gradient: dy is the weight
  ProductReference reference_{};
};

class AllReduceCall final : public Call {
 public:
  AllReduceCall(GpuCommunicator& comm, const Case& c)
      : comm_(comm),
        algorithm_(c.group == kOneShot ? AllReduceAlgorithm::one_shot
                                       : AllReduceAlgorithm::two_shot),
        op_(comm, c.m * c.n, DType::bf16),
        in_(DType::bf16, c.m, c.n),
        out_(DType::bf16, c.m, c.n) {}
  bool exists() const override { return op_.fits(in_.tensor.elements(), algorithm_); }
  void draw(uint64_t seed) override {
    seed_ = seed;
    fill_uniform(in_.tensor, seed, 10 + uint64_t(comm_.rank()), 0, comm_.stream());
    poison(out_.tensor, comm_.stream());
  }
  void run() override { op_.run(in_.tensor, out_.tensor, algorithm_); }
  Verdict verdict() const override {
    return verify_sum(out_.tensor, seed_, 10, comm_.size(), comm_.stream());
  }

 private:
  GpuCommunicator& comm_;
  AllReduceAlgorithm algorithm_;
  AllReduce op_;
  Matrix in_, out_;
  uint64_t seed_ = 0;
};

std::unique_ptr<Call> make_call(GpuCommunicator& comm, const Case& c) {
  const OpDesc of_shards{c.m * comm.size(), c.n, c.k}, whole{c.m, c.n, c.k};
  switch (c.kind) {
    case Kind::ag_gemm:
      return std::make_unique<DenseCall<AgGemm>>(comm, of_shards, c);
    case Kind::gemm_rs:
      return std::make_unique<DenseCall<GemmRs>>(comm, of_shards, c);
    case Kind::gemm_ar:
      return std::make_unique<DenseCall<GemmAr>>(comm, whole, c);
    case Kind::ag_wgrad:
      return std::make_unique<DenseCall<AgWgrad>>(comm, of_shards, c);
    case Kind::all_reduce:
      break;
  }
  return std::make_unique<AllReduceCall>(comm, c);
}

// Barrier with a long deadline, however long the others took before.
void await_all(GpuCommunicator& comm, const char* what) {
  const double deadline = comm.deadline();
  comm.set_deadline(kPatience_s);
  comm.barrier(what);
  comm.set_deadline(deadline);
}

// Makes the call on every rank, with new values, so that leftovers of another call are no result.
void expect_right(GpuCommunicator& comm, Call& call, uint64_t seed, const Case& c) {
  call.draw(seed);
  comm.synchronize();
  await_all(comm, "all are ready");
  call.run();
  comm.synchronize();
  EXPECT_LE(call.verdict().of_bound, 1) << c.what() << ", values " << seed;
}

// Bounded wait, in case a rank ends otherwise.
void await(const std::atomic<int>& count, int wanted) {
  const auto until = Clock::now() + std::chrono::duration<double>(kPatience_s);
  while (count < wanted && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void expect_timeout(GpuCommunicator& comm, Call& call, const Case& c) {
  const auto begin = Clock::now();
  try {
    call.run();
    // Calls enqueued after it must not reach the late rank either.
    for (const uint64_t seed : {5, 6, 7}) {
      call.draw(seed);
      call.run();
    }
    comm.synchronize();
    ADD_FAILURE() << c.what() << ": the wait ended on rank " << comm.rank();
  } catch (const Timeout& error) {
    const std::chrono::duration<double> waited = Clock::now() - begin;
    // Ranks that share a GPU also wait for each other once before enqueueing.
    EXPECT_LT(waited.count(), (comm.shares_gpu() ? 3 : 2) * kDeadline_s) << error.what();
    EXPECT_EQ(error.op, c.op()) << error.what();
    EXPECT_EQ(error.peer, comm.size() - 1) << error.what();
    EXPECT_EQ(error.rank, comm.rank()) << error.what();
  }
}

void expect_no_wrong_result(GpuCommunicator& comm, Call& call, const Case& c) {
  try {
    call.run();
    comm.synchronize();
  } catch (const Timeout&) {
    return;
  } catch (const Aborted&) {
    return;
  }
  EXPECT_LE(call.verdict().of_bound, 1) << c.what() << ": wrong, and no error";
}

/// Runs the case's call on the last rank after all others timed out. Returns false if the call does
/// not exist here.
bool lose_last(int ranks, const Case& c) {
  std::atomic<int> gave_up = 0, ended = 0;
  std::atomic<bool> exists = true;
  const auto body = [&](Communicator& any) {
    GpuCommunicator& comm = as_gpu(any);
    const std::unique_ptr<Call> call = make_call(comm, c);
    if (!call->exists()) {
      exists = false;
      return;
    }
    expect_right(comm, *call, 1, c);  // libraries are loaded
    comm.set_deadline(kDeadline_s);
    // A repeated call becomes a graph, which is replayed from then on.
    for (const uint64_t seed : {2, 3}) expect_right(comm, *call, seed, c);
    call->draw(4);
    comm.synchronize();
    await_all(comm, "all are ready");
    if (comm.rank() + 1 < comm.size()) {
      expect_timeout(comm, *call, c);
      ++gave_up;
    } else {
      await(gave_up, comm.size() - 1);
      expect_no_wrong_result(comm, *call, c);
    }
    // No rank frees memory that another may still access. Then all ranks throw: they must not wait
    // for each other to free it together.
    ++ended;
    await(ended, comm.size());
    throw Aborted(comm.rank(), "the world has lost a rank");
  };
  try {
    run_gpus({ranks, {}, kPatience_s, ranks_per_gpu(ranks)}, body);
    EXPECT_FALSE(exists) << c.what() << ": no error";
  } catch (const Aborted&) {
  }
  return exists;
}

class LostRank : public testing::TestWithParam<std::tuple<int, Case>> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(ranks())) GTEST_SKIP() << "needs " << ranks() << " GPUs";
  }
  int ranks() const { return std::get<0>(GetParam()); }
};
class AfterLostRank : public OnGpus {};

TEST_P(LostRank, LateRankIsReportedAndCannotCorruptTheResult) {
  if (!lose_last(ranks(), std::get<1>(GetParam()))) GTEST_SKIP() << "no such kernel here";
}

TEST_P(AfterLostRank, NewWorldMatchesReference) {
  for (const Kind kind : {Kind::ag_gemm, Kind::gemm_rs}) {
    lose_last(ranks(), {kind, "chunked", "", 512, 1000, 1032});
    run(
        [](GpuCommunicator& comm) {
          for (const Case& c : kCases) {
            if (std::string_view(c.group).starts_with("fused")) continue;
            const std::unique_ptr<Call> call = make_call(comm, c);
            ASSERT_TRUE(call->exists()) << c.what();
            expect_right(comm, *call, 5, c);
          }
        },
        kPatience_s);
  }
}

// Example: "gpus2_gemm_rs_fused_128x128_sending_at_30_m512".
std::string case_name(const testing::TestParamInfo<std::tuple<int, Case>>& info) {
  const auto& [ranks, c] = info.param;
  std::string name;
  for (const char letter : fmt::format("gpus{} {} m{}", ranks, c.what(), c.m)) {
    if (std::isalnum(static_cast<unsigned char>(letter))) {
      name += letter;
    } else if (name.back() != '_') {
      name += '_';
    }
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Gpu, LostRank,
                         testing::Combine(testing::Values(2, 4), testing::ValuesIn(kCases)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Gpu, AfterLostRank, testing::Values(2, 4), gpus_name);

}  // namespace
}  // namespace tandem::test

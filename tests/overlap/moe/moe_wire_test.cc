// Layers whose rows are sent encoded, compared with uncompressed layers on decoded data: each row,
// and each rank's partial sums, encoded and decoded separately.
#include <gmock/gmock.h>

#include "gemm/gemm.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;
using testing::HasSubstr;

constexpr const char* kFormats[] = {"int8", "int4:g32", "int6", "mxfp4", "e4m3", "lossless"};
constexpr MoeOptions kPlans[] = {{Strategy::serial, 0},
                                 {Strategy::overlapped, 1},
                                 {Strategy::overlapped, 3},
                                 {Strategy::overlapped, 5}};

/// Replaces every row of `rows` by its encoded and decoded value.
void send_rows(const Wire& wire, const Tensor& rows) {
  const int64_t columns = rows.dim(1);
  std::vector<std::byte> message(wire.bytes(columns, rows.dtype()));
  for (int64_t i = 0; i < rows.dim(0); ++i) {
    const Tensor row(rows.rows(i, 1).data(), rows.dtype(), {columns});
    encode(wire, row, message);
    decode(wire, message, row);
  }
}

MoeOptions plan_as(MoeOptions plan, const Wire& dispatch, const Wire& combine) {
  plan.dispatch = dispatch;
  plan.combine = combine;
  return plan;
}

/// Forward and backward use the same dispatched rows.
void check_dispatch(Communicator& comm, const Whole& whole, const Wire& wire) {
  RankLayer expected(whole, comm.rank());
  if (comm.size() > 1) send_rows(wire, expected.x.tensor);
  MoeLayer uncompressed(comm, expected.shape(), {Strategy::serial});
  MoeBatch batch;
  expected.run(uncompressed, batch);
  for (const MoeOptions& plan : kPlans) {
    RankLayer rank(whole, comm.rank());
    MoeLayer layer(comm, rank.shape(), plan_as(plan, wire, {}));
    for (int call = 0; call < 2; ++call) rank.run(layer, batch);
    if (!rows_keep_bits()) continue;
    EXPECT_EQ(rank.results(), expected.results())
        << whole.c.describe() << " as " << wire.describe() << ", " << plan.chunks << " chunks";
  }
}

/// This rank's rows of the sum over ranks of their experts' results, all but the local one encoded.
/// Without tensor parallelism: a rank's partial sum is the result with all other experts' weights
/// zero.
std::vector<float> combined(Communicator& comm, const Whole& whole, const Wire& wire) {
  std::vector<float> sum;
  DType dtype = whole.c.dtype;
  for (int holder = 0; holder < comm.size(); ++holder) {
    Whole routed = whole;
    const int each = whole.c.experts / whole.c.ep;
    for (size_t i = 0; i < routed.weights.size(); ++i) {
      if (routed.chosen[i] / each != holder) routed.weights[i] = 0;
    }
    RankLayer rank(routed, comm.rank());
    MoeLayer uncompressed(comm, rank.shape(), {Strategy::serial});
    MoeBatch batch;
    rank.run(uncompressed, batch);
    if (holder != comm.rank()) send_rows(wire, rank.out.tensor);
    const std::vector<float> values = rank.out.values();
    sum.resize(values.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  for (float& value : sum) {
    if (dtype == DType::bf16) value = BFloat16::from_float(value).to_float();
  }
  return sum;
}

void check_combine(Communicator& comm, const Whole& whole, const Wire& wire) {
  std::vector<float> expected;
  if (whole.c.tp == 1 && comm.size() > 1) expected = combined(comm, whole, wire);
  for (const MoeOptions& plan : kPlans) {
    RankLayer rank(whole, comm.rank());
    MoeLayer layer(comm, rank.shape(), plan_as(plan, {}, wire));
    MoeBatch batch;
    for (int call = 0; call < 2; ++call) rank.run(layer, batch);
    const std::vector<float> values = rank.out.values();
    if (expected.empty()) expected = values;  // else only agreement of plans, and the bound below
    if (rows_keep_bits()) {
      EXPECT_EQ(values, expected) << whole.c.describe() << " as " << wire.describe() << ", "
                                  << plan.chunks << " chunks";
    }
  }
}

/// Encoded partial sums compared with the reference: within the format's bound.
void check_bound(Communicator& comm, const Whole& whole, const Wire& wire) {
  const auto reference = moe_reference(whole.problem());
  double largest = 1e-30;
  for (const double value : reference) largest = std::max(largest, std::abs(value));
  // Partial sums are about as large as sums.
  const int shards = std::min(comm.size(), whole.c.top_k * whole.c.tp);
  const double bound =
      (shards * 3 * wire.error_bound() + (whole.c.dtype == DType::f32 ? 1e-4 : 0.04)) * largest;
  RankLayer rank(whole, comm.rank());
  MoeLayer layer(comm, rank.shape(), plan_as({Strategy::overlapped, 2}, {}, wire));
  MoeBatch batch;
  rank.run(layer, batch);
  const Shard local = shard_of(whole.c.rows, comm.size(), comm.rank());
  const std::vector<float> values = rank.out.values();
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(double(values[i]), reference[size_t(local.begin * whole.c.hidden) + i], bound)
        << whole.c.describe() << " as " << wire.describe();
  }
}

void check_all(Communicator& comm, const Whole& whole, const Wire& wire) {
  set_kernel_threads(1);
  check_dispatch(comm, whole, wire);
  check_combine(comm, whole, wire);
  check_bound(comm, whole, wire);
}

class MoeWire : public testing::TestWithParam<Cases> {};
// Six cases have all formats; worlds of two neighbouring sizes have all twelve.
std::vector<Cases> worlds(bool others) {
  std::vector<Cases> all;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const int begin = (ranks % 2 == 1) != others ? 0 : 6;
    all.push_back({ranks, begin, begin + 6});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Worlds, MoeWire, testing::ValuesIn(worlds(false)), world_name);
INSTANTIATE_TEST_SUITE_P(WorldsLong, MoeWire, testing::ValuesIn(worlds(true)), world_name);

TEST_P(MoeWire, MatchesALayerOnDecodedRows) {
  TANDEM_SKIP_UNDER_MPI("worlds of its own");
  const auto [ranks, begin, end] = GetParam();
  std::vector<LayerCase> cases = generated(ranks, end);
  for (int index = begin; index < end; ++index) {
    LayerCase& c = cases[size_t(index)];
    if (index % 3 == 2) c.hidden += 1100;  // columns in many groups, lossless messages coded
    if (index % 3 == 2) c.ffn = 8;
    const Whole whole(c);
    const Wire wire = Wire::parse(kFormats[size_t(index + index / 6) % std::size(kFormats)]);
    WorldOptions options;
    options.ranks = ranks;
    if (index % 4 == 3) options.link = EmulatedLink{1e9, 2e-5};
    run_threads(options, [&](Communicator& comm) { check_all(comm, whole, wire); });
    if (HasFailure()) return;
  }
}

TEST(MoeWireOverMpi, MatchesALayerOnDecodedRows) {
  Communicator* world = mpi_world();
  if (!world) GTEST_SKIP() << "under mpirun";
  size_t index = 0;
  for (const LayerCase& c : generated(world->size(), 12)) {
    check_all(*world, Whole(c), Wire::parse(kFormats[index++ % std::size(kFormats)]));
  }
}

TEST(MoeWireLayer, UncompressedRowsMayBeChosen) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 2, .experts = 4, .top_k = 2, .rows = 64, .hidden = 64, .ffn = 32});
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank());
    const Wire wire = Wire::parse("int8");
    MoeLayer layer(comm, rank.shape(),
                   {.dispatch = wire, .combine = wire, .allow_uncompressed = true});
    MoeBatch batch;
    rank.run(layer, batch);
    EXPECT_LE(rank.error(moe_reference(whole.problem()),
                         moe_reference_backward(whole.problem(), whole.dout)),
              0.1);
  });
}

TEST(MoeWireLayer, UnsupportedFormatsAreRefusedByNameOnEveryRank) {
  TANDEM_SKIP_UNDER_MPI("threads");
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    const auto refusal = [&](const MoeOptions& of) {
      try {
        MoeLayer(comm, {8, 16, 8, 4, 1, 1, DType::f32}, of);
      } catch (const InvalidArgument& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    Wire odd = Wire::parse("int8");
    odd.group = 48;
    EXPECT_THAT(refusal({.dispatch = odd}), HasSubstr("group 48"));
    EXPECT_THAT(refusal({.combine = odd}), HasSubstr("group 48"));
    const Wire other = Wire::parse(comm.rank() ? "int8" : "int4");
    EXPECT_THAT(refusal({.strategy = Strategy::serial, .dispatch = other}), HasSubstr("as int4"));
    EXPECT_THAT(refusal({.strategy = Strategy::serial, .combine = other}),
                HasSubstr("back as int4"));
  });
}

}  // namespace
}  // namespace tandem

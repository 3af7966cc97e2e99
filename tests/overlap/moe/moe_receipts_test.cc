// Receipts of a layer's passes against the plans that it runs, and strict layers.
#include <gmock/gmock.h>

#include "core/system/env.h"
#include "gemm/gemm.h"
#include "overlap/contract/receipt.h"
#include "overlap/moe/cpu/layer.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;
using Stage = MoeLayerOnRanks::Stage;

const Wire kInt8{.codec = Codec::int8};

/// Form of the halves that a pass runs.
Strategy form_of(const MoeLayerOnRanks& layer, Stage rows, Stage sums) {
  const bool overlaps = layer.plan(rows, 0).strategy == Strategy::overlapped ||
                        layer.plan(sums, 0).strategy == Strategy::overlapped;
  return overlaps && layer.coords().world > 1 ? Strategy::overlapped : Strategy::serial;
}

void expect_true(const Receipt& r, const MoeLayerOnRanks& layer, Stage rows, Stage sums) {
  EXPECT_EQ(r.ran, form_of(layer, rows, sums)) << r.candidate;
  EXPECT_THAT(r.candidate, HasSubstr("rows " + moe_candidate_name(layer.plan(rows, 0))));
  EXPECT_THAT(r.candidate, HasSubstr("sums " + moe_candidate_name(layer.plan(sums, 0))));
  EXPECT_EQ(r.why.empty(), r.ran_as_asked());
}

class MoeReceipts : public OnRanks {
 protected:
  MoeShape shape() const {
    return {.tokens = 12, .hidden = 16, .ffn = 8, .experts = 2 * ranks(), .top_k = 2};
  }
};

TEST_P(MoeReceipts, NameThePlansOfBothPasses) {
  run([&](Communicator& comm) {
    set_kernel_threads(1);
    for (const MoeOptions& options :
         {MoeOptions{.strategy = Strategy::serial}, MoeOptions{.strategy = Strategy::overlapped},
          MoeOptions{.strategy = Strategy::automatic},
          MoeOptions{.dispatch = kInt8, .allow_uncompressed = true}}) {
      const MoeLayerOnRanks layer(comm, shape(), options);
      const std::vector<Receipt> passes = layer.receipts();
      ASSERT_EQ(passes.size(), 2u);
      EXPECT_EQ(passes[0].op, "moe");
      EXPECT_EQ(passes[1].op, "moe backward");
      EXPECT_THAT(passes[0].shape, HasSubstr("tokens 12 hidden 16 ffn 8"));
      expect_true(passes[0], layer, Stage::dispatch, Stage::combine);
      expect_true(passes[1], layer, Stage::dispatch_backward, Stage::combine_backward);
      for (const Receipt& r : passes) {
        EXPECT_EQ(r.asked, options.strategy);
        EXPECT_EQ(r.group, comm.size());
        const bool compares = options.strategy == Strategy::automatic && comm.size() > 1;
        EXPECT_TRUE(compares || r.speedup == 0);
        EXPECT_TRUE(!compares || !env().tune || r.speedup > 0);
      }
    }
  });
}

TEST_P(MoeReceipts, CountTheCallsOfEachPass) {
  run([&](Communicator& comm) {
    set_kernel_threads(1);
    clear_receipts();
    const Whole whole({.ep = comm.size(), .experts = comm.size(), .rows = 8});
    RankLayer rank(whole, comm.rank());
    MoeLayer layer(comm, rank.shape(), {.strategy = Strategy::overlapped});
    MoeBatch batch;
    for (int call = 0; call < 3; ++call) rank.run(layer, batch);
    const std::vector<Receipt> rows = receipts();
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].op, "moe");
    EXPECT_EQ(rows[1].op, "moe backward");
    for (const Receipt& r : rows) EXPECT_EQ(r.calls, 3);
    clear_receipts();
  });
}

TEST_P(MoeReceipts, StrictLayersRefuseAPassThatDoesNotOverlap) {
  run([&](Communicator& comm) {
    set_kernel_threads(1);
    const bool one = comm.size() == 1;
    for (const bool backward : {false, true}) {
      const auto make = [&](Strategy strategy) {
        return MoeLayer(comm, shape(),
                        {.strategy = strategy, .backward = backward, .strict = true});
      };
      EXPECT_EQ(error_of<Unsupported>([&] { make(Strategy::serial); }), "");
      const std::string text = error_of<Unsupported>([&] { make(Strategy::overlapped); });
      EXPECT_THAT(text,
                  one ? HasSubstr("a group of 1 rank has nothing to overlap") : HasSubstr(""));
      EXPECT_EQ(text.empty(), !one);
    }
    if (one) return;
    EXPECT_THROW(MoeLayer(comm, shape(), {.strict = comm.rank() == 0}), Mismatch);
  });
}

/// A layer with planted choices, which runs nothing.
class PlantedPasses final : public MoeOnRanks {
 public:
  PlantedPasses(const Receipt& forward, const Receipt& backward, const MoeOptions& options) {
    list(forward, backward, options);
  }
  void prepare(MoeRows&) override {}
  void forward(const Tensor&, const MoeRouting&, const Tensor&, const Tensor&, const Tensor&,
               MoeRows&, const std::function<void()>&) override {}
  void backward(const Tensor&, const Tensor&, const Tensor&, const MoeRows&, const Tensor&,
                const Tensor&, const Tensor&, const Tensor&, WeightGradients,
                const std::function<void()>&) override {}
  Strategy dispatch_strategy() const override { return {}; }
  Strategy combine_strategy() const override { return {}; }
  int64_t dropped_routings() const override { return 0; }
};

TEST(StrictMoe, ASerialBackwardPassIsRefusedOnceItIsAnnouncedOrCalled) {
  Receipt forward{.op = "moe", .group = 2, .ran = Strategy::overlapped},
      backward{.op = "moe backward", .shape = "tokens 4", .group = 2, .why = "serial is faster"};
  const std::string refusal =
      "moe backward: tokens 4, 2 ranks: automatic would run as serial: serial is faster: expected "
      "overlapped, as strict requests";
  EXPECT_EQ(error_of<Unsupported>(
                [&] { PlantedPasses(forward, backward, {.backward = true, .strict = true}); }),
            refusal);
  PlantedPasses forward_only(forward, backward, {.strict = true});
  forward_only.count_forward();
  EXPECT_EQ(error_of<Unsupported>([&] { forward_only.count_backward(); }), refusal);
  EXPECT_EQ(forward_only.receipts()[1].calls, 0);
  backward.ran = Strategy::overlapped;
  PlantedPasses(forward, backward, {.strict = true}).count_backward();
  forward.ran = Strategy::serial;
  EXPECT_NE(error_of<Unsupported>([&] { PlantedPasses(forward, backward, {.strict = true}); }), "");
}

TANDEM_INSTANTIATE(MoeReceipts);

}  // namespace
}  // namespace tandem::test

// Rows that a forward pass saves, and gradients of weights that a backward pass stores: the bits of
// every result are those of sorted rows and of gradients added to zeros.
#include <gtest/gtest.h>

#include <cmath>

#include "gemm/gemm.h"
#include "overlap/moe/cpu/layer.h"
#include "tandem/error.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;

using Results = std::vector<std::vector<float>>;

/// Runs both passes twice with one batch, the gradients of the weights poisoned before.
Results run_twice(RankLayer& rank, MoeLayer& layer, WeightGradients mode) {
  MoeBatch batch;
  Results results;
  for (int run = 0; run < 2; ++run) {
    for (Owned* const dw : {&rank.dw_in, &rank.dw_out}) {
      const float before = mode == WeightGradients::store ? NAN : 0.0f;
      std::fill_n(dw->tensor.as<float>(), dw->tensor.elements(), before);
    }
    layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                  rank.out.tensor, batch);
    layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch, rank.dx.tensor,
                   rank.dweights.tensor, rank.dw_in.tensor, rank.dw_out.tensor, mode);
    if (run == 1) {
      EXPECT_EQ(rank.results(), results) << "a second run has other bits";
    }
    results = rank.results();
  }
  return results;
}

TEST(MoeSaves, EveryChoiceHasTheBitsOfSortedRows) {
  TANDEM_SKIP_UNDER_MPI("threads");
  for (const int ranks : {1, 2, 3, 4}) {
    int index = 0;
    for (const LayerCase& c : generated(ranks, 14)) {
      const Whole whole(c);
      WorldOptions options;
      options.ranks = ranks;
      const bool encodes = index % 3 == 2;
      const int chunks = 1 + index++ % 4;
      run_threads(options, [&](Communicator& comm) {
        set_kernel_threads(1);
        RankLayer rank(whole, comm.rank());
        Results sorted;
        for (const MoeSave save : {MoeSave::sorted, MoeSave::rows, MoeSave::recompute}) {
          for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
            MoeOptions of{strategy, strategy == Strategy::serial ? 0 : chunks};
            of.save = save;
            if (encodes) of.dispatch = {Codec::int8, 32};
            MoeLayer layer(comm, rank.shape(), of);
            const Results found = run_twice(rank, layer, WeightGradients::add);
            if (sorted.empty()) sorted = found;
            if (rows_keep_bits() || strategy == Strategy::serial) {
              EXPECT_EQ(found, sorted) << c.describe() << " save " << int(save);
            }
          }
        }
      });
      if (HasFailure()) return;
    }
  }
}

TEST(MoeSaves, FewerBytesInThisOrder) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 2, .experts = 8, .top_k = 4, .rows = 64, .hidden = 64, .ffn = 16});
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank());
    const auto bytes = [&](MoeSave save) {
      MoeOptions of{Strategy::serial};
      of.save = save;
      MoeLayer layer(comm, rank.shape(), of);
      MoeBatch prepared, batch;
      layer.prepare(prepared);
      layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                    rank.out.tensor, batch);
      EXPECT_GT(prepared.bytes(), 0u);
      return batch.bytes();
    };
    const size_t sorted = bytes(MoeSave::sorted), rows = bytes(MoeSave::rows),
                 recompute = bytes(MoeSave::recompute);
    // About 128 positions on a rank, of rows 64 x f32 and activations 3 x 16 x f32.
    EXPECT_LT(rows, sorted * 2 / 3);
    EXPECT_LT(recompute, rows / 2);
    EXPECT_EQ(recompute / (64 * sizeof(float)), size_t(rank.shape().tokens * 5 / 4));
  });
}

TEST(MoeWeightGradients, StoredOnesAreThoseAddedToZeros) {
  TANDEM_SKIP_UNDER_MPI("threads");
  for (const int ranks : {1, 2, 4}) {
    for (const LayerCase& c : generated(ranks, 20)) {  // experts and ranks without rows, too
      const Whole whole(c);
      WorldOptions options;
      options.ranks = ranks;
      run_threads(options, [&](Communicator& comm) {
        set_kernel_threads(1);
        RankLayer rank(whole, comm.rank());
        MoeLayer layer(comm, rank.shape(), {Strategy::overlapped, 2});
        const Results added = run_twice(rank, layer, WeightGradients::add);
        EXPECT_EQ(run_twice(rank, layer, WeightGradients::store), added) << c.describe();
        // A second microbatch: storing it would lose the first.
        MoeBatch batch;
        layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                      rank.out.tensor, batch);
        layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch, rank.dx.tensor,
                       rank.dweights.tensor, rank.dw_in.tensor, rank.dw_out.tensor);
        const std::vector<float> once = added[3], twice = rank.dw_in.values();
        layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch, rank.dx.tensor,
                       rank.dweights.tensor, rank.dw_in.tensor, rank.dw_out.tensor,
                       WeightGradients::store);
        EXPECT_EQ(rank.dw_in.values(), once) << "storing adds nothing: " << c.describe();
        for (size_t i = 0; i < once.size(); ++i) {
          ASSERT_NEAR(twice[i], 2 * once[i], 1e-5f + 1e-4f * std::abs(once[i])) << c.describe();
        }
      });
      if (HasFailure()) return;
    }
  }
}

TEST(MoeWeightGradients, Bf16OnesAreRoundedOnce) {
  TANDEM_SKIP_UNDER_MPI("threads");
  LayerCase c{.ep = 2, .experts = 4, .top_k = 2, .rows = 40, .hidden = 24, .ffn = 16};
  c.dtype = DType::bf16;
  const Whole whole(c);
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank());
    MoeLayer layer(comm, rank.shape(), {Strategy::serial});
    const Results f32 = run_twice(rank, layer, WeightGradients::store);
    Owned dw_in(DType::bf16, rank.dw_in.tensor.dim(0), rank.dw_in.tensor.dim(1)),
        dw_out(DType::bf16, rank.dw_out.tensor.dim(0), rank.dw_out.tensor.dim(1));
    MoeBatch batch;
    layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                  rank.out.tensor, batch);
    layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch, rank.dx.tensor,
                   rank.dweights.tensor, dw_in.tensor, dw_out.tensor, WeightGradients::store);
    const auto expect_near = [](const Owned& found, const std::vector<float>& expected) {
      const std::vector<float> values = found.values();
      ASSERT_EQ(values.size(), expected.size());
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_NEAR(values[i], expected[i], std::abs(expected[i]) / 256 + 1e-6f);
      }
    };
    expect_near(dw_in, f32[3]);
    expect_near(dw_out, f32[4]);
  });
}

TEST(MoePasses, LocalRowsMayComeFirstInABackwardPass) {
  TANDEM_SKIP_UNDER_MPI("threads");
  for (const LayerCase& c : generated(4, 12)) {
    const Whole whole(c);
    WorldOptions options;
    options.ranks = 4;
    run_threads(options, [&](Communicator& comm) {
      set_kernel_threads(1);
      RankLayer rank(whole, comm.rank());
      MoeLayerOnRanks layer(comm, rank.shape(), {Strategy::overlapped, 3});
      Results last;
      for (const bool first : {true, false}) {
        layer.set_local_dx_first(first);
        MoeRows rows;
        rank.run(layer, rows);
        if (!last.empty()) {
          EXPECT_EQ(rank.results(), last) << c.describe();
        }
        last = rank.results();
      }
    });
  }
}

TEST(MoePasses, CallMeanwhileOnceWhileRowsAreSent) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 2, .experts = 4, .top_k = 2, .rows = 16, .hidden = 16, .ffn = 8});
  for (const MoeSave save : {MoeSave::sorted, MoeSave::recompute}) {
    WorldOptions options;
    options.ranks = 2;
    run_threads(options, [&](Communicator& comm) {
      set_kernel_threads(1);
      RankLayer rank(whole, comm.rank());
      MoeOptions of{Strategy::overlapped, 1};
      of.save = save;
      MoeLayer layer(comm, rank.shape(), of);
      MoeBatch batch;
      int calls = 0;
      std::fill_n(rank.out.tensor.as<float>(), rank.out.tensor.elements(), -1.0f);
      layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                    rank.out.tensor, batch, [&] {
                      ++calls;
                      EXPECT_EQ(rank.out.values().front(), -1);  // no result yet
                    });
      EXPECT_EQ(calls, 1);
      layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch, rank.dx.tensor,
                     rank.dweights.tensor, rank.dw_in.tensor, rank.dw_out.tensor,
                     WeightGradients::store, [&] { ++calls; });
      EXPECT_EQ(calls, 2);
    });
  }
}

TEST(MoeSaves, RanksMustAgree) {
  TANDEM_SKIP_UNDER_MPI("threads");
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    MoeOptions of{Strategy::serial};
    if (comm.rank() == 1) of.save = MoeSave::rows;
    const std::string error = error_of<Mismatch>([&] {
      MoeLayer(comm, {8, 16, 8, 4, 1, 1, DType::f32}, of);
    });
    EXPECT_NE(error.find("saving rows"), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace tandem

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "gemm/gemm.h"
#include "kernels/moe.h"
#include "tandem/error.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;

const LayerCase kCase{.ep = 3, .experts = 6, .top_k = 2, .rows = 12, .hidden = 16, .ffn = 8};

/// Runs `body` on three ranks, each of which must fail with `message`.
template <typename Expected = InvalidArgument, typename Body>
void expect_on_every_rank(const std::string& message, const Body& body) {
  WorldOptions options;
  options.ranks = 3;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    EXPECT_EQ(error_of<Expected>([&] { body(comm); }), message) << "rank " << comm.rank();
  });
}

TEST(MoeErrors, ImpossibleShapesAreNamedOnEveryRank) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  const auto with = [](auto change) {
    return [change](Communicator& comm) {
      MoeShape shape{8, 16, 8, 6, 2, 1, DType::f32};
      change(shape);
      MoeLayer(comm, shape);
    };
  };
  expect_on_every_rank("moe: top_k 7: expected 1 to experts = 6",
                       with([](MoeShape& s) { s.top_k = 7; }));
  expect_on_every_rank("moe: experts 7: expected a multiple of ep = 3",
                       with([](MoeShape& s) { s.experts = 7; }));
  expect_on_every_rank("moe: tp 2: expected a divisor of the communicator's size 3",
                       with([](MoeShape& s) { s.tp = 2; }));
  expect_on_every_rank("moe: hidden 0: expected 1 to 2^30",
                       with([](MoeShape& s) { s.hidden = 0; }));
  expect_on_every_rank("moe: dtype f16: expected f32 or bf16",
                       with([](MoeShape& s) { s.dtype = DType::f16; }));
}

TEST(MoeErrors, DifferentShapesAreAMismatch) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  struct Other {
    std::string value, expected;  ///< on the last rank, on the others
    MoeShape shape;
  };
  const MoeShape shape{8, 16, 8, 12, 2, 1, DType::f32};
  std::vector<Other> others;
  const auto add = [&](const char* value, const char* expected, auto change) {
    others.push_back({value, expected, shape});
    change(others.back().shape);
  };
  add("tokens 9", "tokens 8", [](MoeShape& s) { s.tokens = 9; });
  add("hidden 24", "hidden 16", [](MoeShape& s) { s.hidden = 24; });
  add("ffn 16", "ffn 8", [](MoeShape& s) { s.ffn = 16; });
  add("experts 24", "experts 12", [](MoeShape& s) { s.experts = 24; });
  add("top-k 3", "top-k 2", [](MoeShape& s) { s.top_k = 3; });
  add("bf16", "f32", [](MoeShape& s) { s.dtype = DType::bf16; });
  for (const int ranks : {2, 3, 4}) {
    for (const Other& other : others) {
      WorldOptions options;
      options.ranks = ranks;
      run_threads(options, [&](Communicator& comm) {
        const MoeShape& here = comm.rank() + 1 == ranks ? other.shape : shape;
        const std::string error = error_of<Mismatch>([&] { MoeLayer(comm, here); });
        EXPECT_NE(error.find(other.value), std::string::npos) << error;
        EXPECT_NE(error.find(other.expected), std::string::npos) << error;
        EXPECT_NE(error.find(fmt::format("rank {}", ranks - 1)), std::string::npos) << error;
      });
    }
  }
}

/// Wrong routing on rank 1, followed by a valid one: the ranks stay in step.
void expect_fault(const std::string& message, const std::function<void(RankLayer&)>& spoil) {
  const Whole whole(kCase);
  WorldOptions options;
  options.ranks = 3;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer good(whole, comm.rank()), bad(whole, comm.rank());
    if (comm.rank() == 1) spoil(bad);
    MoeLayer layer(comm, good.shape(), {Strategy::overlapped, 2});
    MoeBatch batch;
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(error_of<Mismatch>([&] { bad.run(layer, batch); }), message);
      good.run(layer, batch);
      EXPECT_LE(good.error(moe_reference(whole.problem()),
                           moe_reference_backward(whole.problem(), whole.dout)),
                1e-5);
    }
  });
}

TEST(MoeErrors, WrongRoutingIsNamedOnEveryRankAndKeepsRanksInStep) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  for (const int32_t expert : {6, -2}) {
    expect_fault(
        fmt::format("moe: rank 1: row 2 goes to expert {}: expected 0 to 5, or -1 for none",
                    expert),
        [expert](RankLayer& rank) { rank.chosen[4] = expert; });
  }
  expect_fault("moe: rank 1: row 0 goes to expert 3 twice: expected different ones",
               [](RankLayer& rank) { rank.chosen[0] = rank.chosen[1] = 3; });
  expect_fault(
      "moe: rank 1: row 1 has the weight nan for expert 5: expected a finite number (are "
      "the router's logits?)",
      [](RankLayer& rank) {
        rank.chosen[2] = 5;
        rank.chosen[3] = 1;
        rank.weights[2] = NAN;
      });
}

/// Type and text of the exception that `body` throws.
template <typename Body>
std::string named_error_of(const Body& body) {
  try {
    body();
  } catch (const Mismatch& error) {
    return std::string("Mismatch ") + error.what();
  } catch (const InvalidArgument& error) {
    return std::string("InvalidArgument ") + error.what();
  } catch (const Error& error) {
    return std::string("another ") + error.what();
  }
  return "no error";
}

/// A call that fails on rank 1 of `ranks`, followed by a valid call of the same layer, whose
/// results are compared with the reference.
struct RefusedCall {
  RankLayer &good, &spare;
  MoeLayer &layer, &other;
  MoeBatch& batch;  ///< from a valid call
  bool spoils;      ///< on this rank

  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& out) {
    MoeBatch scratch;
    layer.forward(x, routing, good.w_in.tensor, good.w_out.tensor, out, scratch);
  }
  void backward(const MoeBatch& of, const Tensor& dout, const Tensor& dx) {
    layer.backward(dout, good.w_in.tensor, good.w_out.tensor, of, dx, good.dweights.tensor,
                   good.dw_in.tensor, good.dw_out.tensor);
  }
};

/// `local`: prefix of rank 1's error; the others throw a Mismatch that names rank 1 and continues
/// with the same text.
void expect_refused(const std::string& local, const std::function<void(RefusedCall&)>& call) {
  LayerCase c = kCase;
  for (int ranks = 2; ranks <= 4; ++ranks) {
    c.ep = ranks;
    c.experts = 2 * ranks;
    c.rows = 4 * ranks;
    const Whole whole(c);
    const auto reference = moe_reference(whole.problem());
    const auto gradients = moe_reference_backward(whole.problem(), whole.dout);
    WorldOptions options;
    options.ranks = ranks;
    run_threads(options, [&](Communicator& comm) {
      set_kernel_threads(1);
      comm.set_deadline(20);
      RankLayer good(whole, comm.rank()), spare(whole, comm.rank());
      MoeLayer layer(comm, good.shape(), {Strategy::overlapped, 2});
      MoeLayer other(comm, good.shape(), {Strategy::serial, 0});
      MoeBatch batch;
      for (int round = 0; round < 3; ++round) {
        good.run(layer, batch);
        RefusedCall refused{good, spare, layer, other, batch, comm.rank() == 1};
        const std::string error = named_error_of([&] { call(refused); });
        const std::string want =
            comm.rank() == 1 ? "InvalidArgument moe: " + local : "Mismatch moe: rank 1: " + local;
        EXPECT_TRUE(error.starts_with(want))
            << "rank " << comm.rank() << " of " << ranks << ": " << error << "\nexpected " << want;
        EXPECT_LE(good.error(reference, gradients), 1e-5) << "results were touched";
        good.run(layer, batch);
        EXPECT_LE(good.error(reference, gradients), 1e-5) << "after it";
      }
    });
  }
}

TEST(MoeErrors, WrongOperandsOfOneRankAreNamedOnEveryRank) {
  TANDEM_SKIP_UNDER_MPI("worlds of its own");
  expect_refused("x is f32[5, 16]: expected f32[4, 16]", [](RefusedCall& call) {
    const Owned five(DType::f32, 5, 16);
    call.forward(call.spoils ? five.tensor : call.good.x.tensor, call.good.routing(),
                 call.spare.out.tensor);
  });
  expect_refused("routing.experts is i32[8, 1]: expected i32[4, 2]", [](RefusedCall& call) {
    MoeRouting routing = call.good.routing();
    if (call.spoils) routing.experts = Tensor::of(std::span(call.good.chosen), {8, 1});
    call.forward(call.good.x.tensor, routing, call.spare.out.tensor);
  });
  expect_refused("out f32[4, 16] at [", [](RefusedCall& call) {
    call.forward(call.spare.x.tensor, call.good.routing(),
                 call.spoils ? call.spare.x.tensor : call.spare.out.tensor);
  });
}

TEST(MoeErrors, WrongBackwardOperandsAreNamedOnEveryRank) {
  TANDEM_SKIP_UNDER_MPI("worlds of its own");
  expect_refused("dout is f32[4, 8]: expected f32[4, 16]", [](RefusedCall& call) {
    const Owned narrow(DType::f32, 4, 8);
    call.backward(call.batch, call.spoils ? narrow.tensor : call.good.dout.tensor,
                  call.spare.dx.tensor);
  });
  expect_refused("dx f32[4, 16] at [", [](RefusedCall& call) {
    call.backward(call.batch, call.spare.dout.tensor,
                  call.spoils ? call.spare.dout.tensor : call.spare.dx.tensor);
  });
  expect_refused("the batch is not filled: expected that of a forward pass", [](RefusedCall& call) {
    const MoeBatch fresh;
    const Owned none(DType::f32, 0, 16);
    call.backward(call.spoils ? fresh : call.batch,
                  call.spoils ? none.tensor : call.good.dout.tensor,
                  call.spoils ? none.tensor : call.spare.dx.tensor);
  });
  expect_refused("the batch is another layer's: expected one that this layer has filled",
                 [](RefusedCall& call) {
                   MoeBatch others;
                   call.spare.run(call.other, others);
                   call.backward(call.spoils ? others : call.batch, call.good.dout.tensor,
                                 call.spare.dx.tensor);
                 });
}

TEST(MoeErrors, RanksInDifferentCallsAreNamedOnEveryRank) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  const Whole whole(kCase);
  WorldOptions options;
  options.ranks = 3;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank()), spare(whole, comm.rank());
    MoeLayer layer(comm, rank.shape(), {Strategy::overlapped, 3});
    MoeBatch first, second;
    rank.run(layer, first);   // calls 1 and 2
    rank.run(layer, second);  // 3 and 4
    EXPECT_EQ(error_of<Mismatch>([&] {
                const MoeBatch& batch = comm.rank() == 2 ? first : second;
                layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch,
                               spare.dx.tensor, spare.dweights.tensor, spare.dw_in.tensor,
                               spare.dw_out.tensor);
              }),
              "moe: rank 2: backward of call 1: expected backward of call 3 as on rank 0");
    EXPECT_EQ(error_of<Mismatch>([&] {
                if (comm.rank() == 1) {
                  MoeBatch batch;
                  layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                                spare.out.tensor, batch);
                } else {
                  layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, second,
                                 spare.dx.tensor, spare.dweights.tensor, spare.dw_in.tensor,
                                 spare.dw_out.tensor);
                }
              }),
              "moe: rank 1: forward: expected backward of call 3 as on rank 0");
    rank.run(layer, first);
    EXPECT_LE(rank.error(moe_reference(whole.problem()),
                         moe_reference_backward(whole.problem(), whole.dout)),
              1e-5);
  });
}

TEST(MoeErrors, MovedFromBatchIsEmptyAndMayBeReused) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  const Whole whole({.experts = 2, .top_k = 1, .rows = 4, .hidden = 16, .ffn = 8});
  run_threads({}, [&](Communicator& comm) {
    RankLayer rank(whole, 0);
    MoeLayer layer(comm, rank.shape());
    MoeBatch batch;
    rank.run(layer, batch);
    const MoeBatch taken = std::move(batch);
    EXPECT_TRUE(batch.rows_of_experts().empty());
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch,
                               rank.dx.tensor, rank.dweights.tensor, rank.dw_in.tensor,
                               rank.dw_out.tensor);
              }),
              "moe: the batch is not filled: expected that of a forward pass");
    rank.run(layer, batch);
    EXPECT_EQ(batch.rows_of_experts().size(), 2u);
  });
}

TEST(MoeErrors, WrongOperandsAreNamed) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  const Whole whole({.experts = 2, .top_k = 1, .rows = 4, .hidden = 16, .ffn = 8});
  run_threads({}, [&](Communicator& comm) {
    RankLayer rank(whole, 0);
    MoeLayer layer(comm, rank.shape());
    MoeBatch batch;
    const Owned wide(DType::f32, 4, 24), short_out(DType::f32, 3, 16);
    const auto forward = [&](const Tensor& x, const Tensor& w_in, const Tensor& out) {
      return error_of<InvalidArgument>(
          [&] { layer.forward(x, rank.routing(), w_in, rank.w_out.tensor, out, batch); });
    };
    EXPECT_EQ(forward(wide.tensor, rank.w_in.tensor, rank.out.tensor),
              "moe: x is f32[4, 24]: expected f32[4, 16]");
    EXPECT_EQ(forward(rank.x.tensor, rank.w_in.tensor, short_out.tensor),
              "moe: out is f32[3, 16]: expected f32[4, 16]");
    EXPECT_EQ(forward(rank.x.tensor, rank.w_out.tensor, rank.out.tensor),
              "moe: w_in is f32[32, 8]: expected f32[32, 16]");
  });
}

}  // namespace
}  // namespace tandem

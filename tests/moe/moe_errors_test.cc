#include <gtest/gtest.h>

#include <cmath>

#include "gemm/gemm.h"
#include "kernels/moe.h"
#include "tandem/error.h"
#include "tests/comm/ranks.h"
#include "tests/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;

const LayerCase kCase{.ep = 3, .experts = 6, .top_k = 2, .rows = 12, .hidden = 16, .ffn = 8};

template <typename Expected, typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Expected& error) {
    return error.what();
  }
  return "no error";
}

/// `body` on three ranks, each of which must fail with `message`.
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

TEST(MoeErrors, ShapesThatDifferAreAMismatch) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    EXPECT_THROW(MoeLayer(comm, {8, 16, 8, 4, 1 + comm.rank(), 1, DType::f32}), Mismatch);
  });
}

/// A wrong routing on rank 1, and after it a right one: the ranks stay together.
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

TEST(MoeErrors, WrongRoutingIsNamedOnEveryRankAndLeavesThemTogether) {
  TANDEM_SKIP_UNDER_MPI("a world of its own");
  expect_fault("moe: rank 1: row 2 goes to expert 6: expected 0 to 5",
               [](RankLayer& rank) { rank.chosen[4] = 6; });
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

TEST(MoeErrors, OperandsThatDoNotFitAreNamed) {
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

// The public class of context-parallel attention: bits, bytes and rows of the operator that it
// wraps, and refusals by one line.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tandem/attention.h"
#include "tandem/error.h"
#include "tandem/world.h"
#include "tests/error_of.h"
#include "tests/overlap/attention/problem.h"

namespace tandem::test {
namespace {

constexpr double kTheta = 100;
using Shape = ContextAttention::Shape;
using Options = ContextAttentionOptions;

Shape to_public(const ContextCase& c) {
  const ContextShape& s = c.shape;
  return {.batch = s.batch,
          .seq = s.seq,
          .keys = s.keys,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .dtype = s.dtype,
          .causal = s.causal,
          .contiguous = s.split == schedule::ContextSplit::contiguous,
          .window = c.window,
          .rope_theta = s.causal ? kTheta : 0};
}

void run(ContextAttention& attention, const ContextProblem& p) {
  const Tensor* const starts =
      p.mask.document_starts.dims() > 0 ? &p.mask.document_starts : nullptr;
  attention.forward(p.q, p.k, p.v, p.out, p.log_sums, starts);
  attention.backward(p.q, p.k, p.v, p.out, p.log_sums, p.dout, p.dq, p.dk, p.dv, starts);
}

TEST(PublicAttention, HasTheBitsAndTheBytesOfTheOperator) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (ContextCase c : generate_cases(24, dtype)) {
      c.shape.softcap = 0;  // the public attention has none
      SCOPED_TRACE(c.describe());
      run_threads({.ranks = c.ranks}, [&](Communicator& comm) {
        const RopeTable rope(Exec{}, c.shape.seq, c.shape.head_dim, kTheta);
        ContextProblem local(c, comm.size(), comm.rank());
        ContextOperator wrapped(comm, c.shape, c.shape.causal ? &rope : nullptr,
                                {.form = "gather"});
        local.run(wrapped);
        const std::vector<std::byte> expected = local.result();
        for (const std::string form : {"gather", "ring", "queries"}) {
          local.clear();
          ContextAttention attention(comm, to_public(c), {.form = form});
          const uint64_t before = comm.bytes_sent();
          run(attention, local);
          EXPECT_EQ(local.result(), expected) << form;
          EXPECT_EQ(comm.bytes_sent() - before,
                    uint64_t(attention.forward_bytes() + attention.backward_bytes()))
              << form;
        }
      });
    }
  }
}

TEST(PublicAttention, ChunksAreThoseOfItsRowsAndCoverTheSequence) {
  for (const bool contiguous : {false, true}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (int64_t positions = 0; positions <= 3 * ranks; ++positions) {
        std::vector<int> count(size_t(positions), 0);
        for (int rank = 0; rank < ranks; ++rank) {
          const ContextChunks chunks = context_chunks(positions, ranks, rank, contiguous);
          for (int64_t i = 0; i < chunks.count(); ++i) ++count[size_t(chunks.position(i))];
          const Shard shard = shard_of(positions, ranks, rank);
          if (!contiguous) continue;
          EXPECT_EQ(chunks.head.begin, shard.begin);
          EXPECT_EQ(chunks.count(), shard.count);
        }
        EXPECT_EQ(count, std::vector<int>(size_t(positions), 1));
      }
    }
  }
  run_threads({.ranks = 3}, [](Communicator& comm) {
    const ContextAttention attention(
        comm, {.seq = 7, .keys = 4, .head_dim = 2, .causal = false, .contiguous = true});
    EXPECT_EQ(attention.query_chunks().count(), shard_of(7, 3, comm.rank()).count);
    EXPECT_EQ(attention.key_chunks().count(), shard_of(4, 3, comm.rank()).count);
  });
  EXPECT_THAT(error_of<InvalidArgument>([] { context_chunks(4, 2, 2); }),
              testing::StartsWith("context_chunks: positions 4 rank 2 of 2: expected"));
}

/// Rotation tables reach the last key, and all forms rotate alike.
TEST(PublicAttention, RotatesKeysBehindTheLastQuery) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    run_threads({.ranks = ranks}, [](Communicator& comm) {
      const ContextCase c{.shape = {.seq = 3, .keys = 40, .head_dim = 4, .causal = false}};
      Shape shape = to_public(c);
      shape.rope_theta = kTheta;
      const ContextProblem p(c, comm.size(), comm.rank());
      ContextAttention rotated(comm, shape, {.form = "ring"});
      run(rotated, p);
      const std::vector<std::byte> turned = p.result();
      ContextAttention unrotated(comm, to_public(c), {.form = "ring"});
      run(unrotated, p);
      EXPECT_NE(p.result(), turned);
      for (const char* form : {"queries", "gather"}) {
        ContextAttention other(comm, shape, {.form = form});
        run(other, p);
        EXPECT_EQ(p.result(), turned) << form;
      }
    });
  }
}

TEST(PublicAttention, MayBeMovedAndSaysSo) {
  run_threads({.ranks = 2}, [](Communicator& comm) {
    const ContextCase c{.shape = {.seq = 5, .keys = 5, .head_dim = 2}};
    const ContextProblem local(c, comm.size(), comm.rank());
    ContextAttention first(comm, to_public(c), {.strategy = Strategy::serial});
    ContextAttention attention = std::move(first);
    run(attention, local);
    EXPECT_EQ(attention.forward_form(), "gather");
    EXPECT_EQ(error_of<InvalidArgument>([&] { run(first, local); }),
              "context_attention: called on an operator that was moved from");
  });
}

/// Messages of the InvalidArgument, such as a Mismatch, that ranks of one world throw.
std::vector<std::string> refusals(int ranks,
                                  const std::function<std::pair<Shape, Options>(int)>& of) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  run_threads({.ranks = ranks}, [&](Communicator& comm) {
    std::string& text = texts[size_t(comm.rank())];
    try {
      const auto [shape, options] = of(comm.rank());
      const ContextAttention attention(comm, shape, options);
    } catch (const InvalidArgument& error) {
      text = error.what();
    }
    comm.barrier();  // the ranks are in step
  });
  return texts;
}

TEST(PublicAttention, RanksThatDifferAreNamedOnAllRanks) {
  const Shape good{.seq = 8, .head_dim = 4};
  const auto on_rank_1 = [&](auto change) {
    const std::vector<std::string> texts = refusals(3, [&](int rank) {
      Shape shape = good;
      Options options;
      if (rank == 1) change(shape, options);
      return std::pair(shape, options);
    });
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_EQ(texts[0], texts[2]);
    return texts[0];
  };
  using testing::HasSubstr;
  EXPECT_THAT(on_rank_1([](Shape& s, Options&) { s.seq = 9; }),
              testing::AllOf(HasSubstr("rank 1"), HasSubstr("seq 9"), HasSubstr("seq 8")));
  EXPECT_THAT(on_rank_1([](Shape& s, Options&) { s.seq = 0; }),
              testing::AllOf(HasSubstr("rank 1"), HasSubstr("seq 0: expected 1 to 2^30")));
  EXPECT_THAT(on_rank_1([](Shape&, Options& o) { o.form = "star"; }),
              testing::AllOf(HasSubstr("rank 1"), HasSubstr("form 'star': expected one of")));
  EXPECT_THAT(on_rank_1([](Shape& s, Options&) { s.rope_theta = 5; }),
              testing::AllOf(HasSubstr("rank 1"), HasSubstr("rope_theta 5")));
  EXPECT_THAT(on_rank_1([](Shape& s, Options&) { s.window = 2; }), HasSubstr("window 2"));
  EXPECT_THAT(on_rank_1([](Shape&, Options& o) { o.backward = false; }), HasSubstr("backward"));
}

TEST(PublicAttention, RefusesBadInputByOneLine) {
  const auto with = [](auto change) {
    Shape shape{.seq = 8, .head_dim = 4};
    change(shape);
    return refusals(1, [&](int) { return std::pair(shape, Options{}); })[0];
  };
  EXPECT_EQ(with([](Shape&) {}), "");
  EXPECT_EQ(with([](Shape& s) { s.rope_theta = -1; }),
            "context_attention: rope_theta -1: expected 0 or a positive number");
  EXPECT_EQ(with([](Shape& s) { s.window = -1; }),
            "context_attention: window -1: expected 0 or more");
  EXPECT_EQ(with([](Shape& s) { s.causal = false, s.window = 3; }),
            "context_attention: window 3: expected 0 without causal");
  run_threads({.ranks = 1}, [](Communicator& comm) {
    const ContextCase c{.ranks = 1, .shape = {.seq = 4, .keys = 4, .head_dim = 2}, .document = 1};
    const ContextProblem local(c, 1, 0);
    ContextAttention attention(comm, to_public(c));
    run(attention, local);
    local.mask.document_starts.as<int32_t>()[2] = 3;
    EXPECT_THAT(error_of<InvalidArgument>([&] { run(attention, local); }),
                testing::StartsWith("context_attention: document_starts: 3 at position 2 of "
                                    "sequence 0: expected the position itself or"));
    local.mask.document_starts.as<int32_t>()[0] = -1;
    EXPECT_EQ(error_of<InvalidArgument>([&] { run(attention, local); }),
              "context_attention: document_starts: -1 at position 0 of sequence 0: expected the "
              "position itself");
  });
}

}  // namespace
}  // namespace tandem::test

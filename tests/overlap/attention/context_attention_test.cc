#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "overlap/attention/operator.h"
#include "overlap/attention/reference.h"
#include "tandem/error.h"
#include "tests/error_of.h"
#include "tests/overlap/attention/problem.h"

namespace tandem {
namespace {
using namespace tandem::test;
using schedule::ContextRows;

constexpr double kTheta = 100;
const std::vector<std::string> kForms = [] {
  std::vector<std::string> names;
  for (const ContextFormRow* row : context_forms()) names.emplace_back(row->name);
  return names;
}();

const ContextFormRow& form_named(std::string_view name) {
  for (const ContextFormRow* row : context_forms()) {
    if (row->name == name) return *row;
  }
  throw InvalidArgument(std::string(name));
}

bool runs(std::string_view form, const ContextCase& c) {
  return form_named(form).refusal({c.shape, c.ranks, 0}).empty();
}

void on_ranks(const ContextCase& c, const std::function<void(Communicator&)>& body) {
  SCOPED_TRACE(c.describe());
  run_threads({.ranks = c.ranks}, body);
}

/// Max difference of two tensors' rows, and max magnitude of the second's.
struct Worst {
  double difference = 0, size = 1e-30, over_bound = 0;
  void add(double value, double expected, double bound = 1) {
    const double d = std::isnan(value) ? INFINITY : std::abs(value - expected);
    difference = std::max(difference, d);
    size = std::max(size, std::abs(expected));
    over_bound = std::max(over_bound, d / bound);
  }
  double relative() const { return difference / size; }
};

/// Compares the rows of `grid.rank` with those of one process.
void compare_rows(const ContextProblem& local, const ContextProblem& whole,
                  std::map<std::string, Worst>& worst) {
  const ContextGrid& grid = local.grid;
  const auto compare = [&](const char* name, const Tensor& a, const Tensor& b,
                           const ContextRows& rows, int64_t positions) {
    for (int64_t row = 0; row < a.dim(0); ++row) {
      const int64_t at = row / rows.count() * positions + rows.position(row % rows.count());
      for (int64_t c = 0; c < a.dim(1); ++c) worst[name].add(element(a, row, c), element(b, at, c));
    }
  };
  const ContextRows rows = grid.queries(grid.rank), keys = grid.keys(grid.rank);
  compare("out", local.out, whole.out, rows, grid.shape.seq);
  compare("dq", local.dq, whole.dq, rows, grid.shape.seq);
  compare("dk", local.dk, whole.dk, keys, grid.shape.keys);
  compare("dv", local.dv, whole.dv, keys, grid.shape.keys);
  for (int64_t row = 0; row < local.log_sums.dim(0); ++row) {
    for (int64_t i = 0; i < rows.count(); ++i) {
      worst["log_sums"].add(element(local.log_sums, row, i),
                            element(whole.log_sums, row, rows.position(i)));
    }
  }
}

/// Result of one process: the local attention, or without a mask a world of one rank.
void run_one_process(const ContextProblem& whole) {
  const ContextShape& s = whole.grid.shape;
  const RopeTable rope(Exec{}, s.seq, s.head_dim, kTheta);
  if (s.causal) {
    Attention attention(Exec{}, {s.batch, s.seq, s.heads, s.kv_heads, s.head_dim, s.softcap}, rope);
    attention.forward(Exec{}, whole.q, whole.k, whole.v, whole.out, whole.log_sums, whole.mask);
    attention.backward(Exec{}, whole.q, whole.k, whole.v, whole.out, whole.log_sums, whole.dout,
                       whole.dq, whole.dk, whole.dv, whole.mask);
    return;
  }
  run_threads({.ranks = 1}, [&](Communicator& comm) {
    ContextOperator attention(comm, s, nullptr);
    whole.run(attention);
  });
}

TEST(ContextAttention, AllFormsEqualOneProcess) {
  for (const ContextCase& c : generate_cases(72, DType::f32)) {
    const ContextProblem whole(c, 1, 0);
    run_one_process(whole);
    std::map<std::string, Worst> worst;
    std::mutex mutex;
    on_ranks(c, [&](Communicator& comm) {
      const RopeTable rope(Exec{}, c.shape.seq, c.shape.head_dim, kTheta);
      std::vector<std::byte> first;
      for (const std::string& form : kForms) {
        if (!runs(form, c)) continue;
        ContextProblem local(c, comm.size(), comm.rank());
        ContextOperator attention(comm, c.shape, c.shape.causal ? &rope : nullptr, {.form = form});
        local.run(attention);
        const std::vector<std::byte> bits = local.result();
        if (first.empty()) first = bits;
        EXPECT_EQ(bits, first) << form << " on rank " << comm.rank();
        const std::scoped_lock lock(mutex);
        compare_rows(local, whole, worst);
      }
    });
    // A query with one key has gradients of 0 for both, and rounding errors in their place.
    const double gradients = std::max({worst["dq"].size, worst["dk"].size, worst["dv"].size});
    for (auto& [name, error] : worst) {
      if (name.starts_with('d')) error.size = gradients;
      EXPECT_LE(error.relative(), 1e-6) << name << " of " << c.describe();
    }
  }
}

/// Compares all rows of this rank with the reference in double.
void compare_with_reference(Communicator& comm, const ContextProblem& local, const RopeTable* rope,
                            Worst& worst) {
  const ContextGrid& grid = local.grid;
  const ContextShape& s = grid.shape;
  ContextReference reference(comm, grid, rope, local.forward());
  reference.gather_gradients(local.backward());
  const double relative = reference.relative_bound(std::max(s.seq * s.heads / s.kv_heads, s.keys));
  const double half_ulp = s.dtype == DType::bf16 ? 0x1p-8 : 0x1p-23;
  const auto compare = [&](const Tensor& tensor, int64_t row, int64_t head,
                           const std::vector<double>& expected, double magnitude) {
    for (size_t d = 0; d < expected.size(); ++d) {
      worst.add(element(tensor, row, head * s.head_dim + int64_t(d)), expected[d],
                2 * relative * magnitude + half_ulp * std::abs(expected[d]) + 1e-12);
    }
  };
  const ContextRows rows = grid.queries(grid.rank), keys = grid.keys(grid.rank);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t i = 0; i < rows.count(); ++i) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const auto query = reference.query(b, h, rows.position(i));
        compare(local.out, b * rows.count() + i, h, query.out, query.magnitude);
        const auto dq = reference.dq(b, h, rows.position(i));
        compare(local.dq, b * rows.count() + i, h, dq.value, dq.magnitude);
        worst.add(element(local.log_sums, b * s.heads + h, i), query.log_sum,
                  relative + 1e-6 * std::abs(query.log_sum));
      }
    }
    for (int64_t i = 0; i < keys.count(); ++i) {
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        const auto key = reference.key(b, h, keys.position(i));
        compare(local.dk, b * keys.count() + i, h, key.dk.value, key.dk.magnitude);
        compare(local.dv, b * keys.count() + i, h, key.dv.value, key.dv.magnitude);
      }
    }
  }
}

TEST(ContextAttention, MatchesReferenceWithinItsBound) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const ContextCase& c : generate_cases(32, dtype)) {
      Worst worst;
      std::mutex mutex;
      on_ranks(c, [&](Communicator& comm) {
        const RopeTable rope(Exec{}, c.shape.seq, c.shape.head_dim, kTheta);
        const RopeTable* const used = c.shape.causal ? &rope : nullptr;
        ContextProblem local(c, comm.size(), comm.rank());
        ContextOperator attention(comm, c.shape, used, {.form = "ring"});
        local.run(attention);
        Worst found;
        compare_with_reference(comm, local, used, found);
        const std::scoped_lock lock(mutex);
        worst.over_bound = std::max(worst.over_bound, found.over_bound);
      });
      EXPECT_LE(worst.over_bound, 1) << c.describe();
    }
  }
}

TEST(ContextAttention, Bf16FormsGiveTheSameBits) {
  for (const ContextCase& c : generate_cases(24, DType::bf16)) {
    on_ranks(c, [&](Communicator& comm) {
      const RopeTable rope(Exec{}, c.shape.seq, c.shape.head_dim, kTheta);
      std::vector<std::byte> first;
      for (const std::string& form : kForms) {
        if (!runs(form, c)) continue;
        ContextProblem local(c, comm.size(), comm.rank());
        ContextOperator attention(comm, c.shape, c.shape.causal ? &rope : nullptr, {.form = form});
        for (int again = 0; again < 2; ++again) {
          local.clear();
          local.run(attention);
          if (first.empty()) first = local.result();
          EXPECT_EQ(local.result(), first) << form << ", " << c.describe();
        }
      }
    });
  }
}

TEST(ContextAttention, SendsTheBytesOfItsFormulas) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const ContextCase& c : generate_cases(24, dtype)) {
      on_ranks(c, [&](Communicator& comm) {
        for (const std::string& form : kForms) {
          if (!runs(form, c)) continue;
          ContextProblem local(c, comm.size(), comm.rank());
          ContextOperator attention(comm, c.shape, nullptr, {.form = form});
          const uint64_t before = comm.bytes_sent();
          attention.forward(local.q, local.k, local.v, local.out, local.log_sums, local.mask);
          const uint64_t between = comm.bytes_sent();
          attention.backward(local.q, local.k, local.v, local.out, local.log_sums, local.dout,
                             local.dq, local.dk, local.dv, local.mask);
          const auto formula = [&](ContextPass pass) {
            return uint64_t(form_named(form).sent_bytes(pass, attention.grid(), c.window));
          };
          EXPECT_EQ(between - before, formula(ContextPass::forward)) << form << c.describe();
          EXPECT_EQ(comm.bytes_sent() - between, formula(ContextPass::backward))
              << form << c.describe();
        }
      });
    }
  }
}

/// Sum of all ranks' bytes.
int64_t total_bytes(std::string_view form, ContextPass pass, ContextGrid grid) {
  int64_t bytes = 0;
  for (grid.rank = 0; grid.rank < grid.world; ++grid.rank) {
    bytes += form_named(form).sent_bytes(pass, grid, 0);
  }
  return bytes;
}

// n ranks, rows S / n, q and kv columns, w bytes an element; per rank.
TEST(ContextBytes, AreThePublishedOnesOfEvenShapes) {
  const int64_t n = 4, rows = 512 / n, q = 8 * 64, kv = 4 * 64, heads = 8, w = 2;
  const ContextShape cross{.seq = 512,
                           .keys = 512,
                           .heads = 8,
                           .kv_heads = 4,
                           .head_dim = 64,
                           .dtype = DType::bf16,
                           .causal = false};
  ContextShape causal = cross;
  causal.causal = true;
  const ContextGrid all{cross, int(n), 0}, half{causal, int(n), 0};
  const auto forward = ContextPass::forward, backward = ContextPass::backward;
  EXPECT_EQ(total_bytes("ring", forward, all), n * (n - 1) * rows * 2 * kv * w);
  EXPECT_EQ(total_bytes("gather", forward, all), total_bytes("ring", forward, all));
  EXPECT_EQ(total_bytes("ring", backward, all), n * (n - 1) * rows * 2 * kv * (w + 4));
  // A causal rank never needs a quarter of the others' chunks.
  EXPECT_EQ(total_bytes("ring", forward, half), n * (n - 1) * rows * 2 * kv * w * 3 / 4);
  EXPECT_EQ(total_bytes("queries", forward, all), n * (n - 1) * rows * (q * w + q * 4 + heads * 4));
  EXPECT_EQ(total_bytes("queries", backward, all),
            n * (n - 1) * rows * (2 * q * w + heads * 8 + q * 4));
  EXPECT_EQ(total_bytes("heads", forward, all),
            n * (n - 1) * rows * (2 * q * w + 2 * kv * w + heads * 4) / n);
  EXPECT_EQ(total_bytes("heads", forward, half), total_bytes("heads", forward, all));
}

/// Message of the InvalidArgument that the operator throws on one rank of `ranks`.
std::string refusal(ContextShape shape, const ContextOptions& options, int ranks = 1,
                    const std::function<void(ContextOperator&)>& call = {}) {
  try {
    run_threads({.ranks = ranks}, [&](Communicator& comm) {
      ContextOperator attention(comm, shape, nullptr, options);
      if (call) call(attention);
    });
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "none";
}

TEST(ContextAttention, RefusesBadInputByOneLine) {
  const ContextShape good{.seq = 8, .heads = 4, .kv_heads = 2, .head_dim = 4};
  const auto with = [&](auto change) {
    ContextShape s = good;
    change(s);
    return refusal(s, {});
  };
  EXPECT_EQ(with([](auto&) {}), "none");
  EXPECT_EQ(with([](auto& s) { s.seq = 0; }), "context_attention: seq 0: expected 1 to 2^30");
  EXPECT_EQ(with([](auto& s) { s.batch = 0; }), "context_attention: batch 0: expected 1 to 2^30");
  EXPECT_EQ(with([](auto& s) { s.heads = 3; }),
            "context_attention: heads 3: expected a multiple of kv_heads 2");
  EXPECT_EQ(with([](auto& s) { s.head_dim = 5; }),
            "context_attention: head_dim 5: expected an even number from 2 on");
  EXPECT_EQ(with([](auto& s) { s.keys = 9; }),
            "context_attention: keys 9: expected seq 8 of causal attention");
  EXPECT_EQ(with([](auto& s) { s.dtype = DType::f16; }),
            "context_attention: dtype f16: expected f32 or bf16");
  EXPECT_EQ(refusal(good, {.form = "heads"}, 4),
            "context_attention: form heads: kv_heads 2: expected a multiple of the 4 ranks");
  EXPECT_EQ(refusal(good, {.form = "star"}),
            "context_attention: form 'star': expected one of gather, ring, heads, queries");
  ContextShape shape = good;
  shape.keys = shape.seq;
  const ContextProblem local({.ranks = 1, .shape = shape}, 1, 0);
  const auto forward = [&](const Tensor& k, const AttentionMask& mask) {
    return refusal(good, {}, 1, [&](ContextOperator& attention) {
      attention.forward(local.q, k, local.v, local.out, local.log_sums, mask);
    });
  };
  EXPECT_THAT(forward(local.q, {}), testing::StartsWith("context_attention: k is f32[8, 16] with"));
  EXPECT_EQ(forward(local.k, {-1}), "context_attention: window -1: expected 0 or more");
  EXPECT_THAT(forward(local.k, {0, local.q}),
              testing::StartsWith("context_attention: document_starts"));
  EXPECT_EQ(refusal(good, {.backward = false}, 1,
                    [&](ContextOperator& attention) {
                      attention.backward(local.q, local.k, local.v, local.out, local.log_sums,
                                         local.dout, local.dq, local.dk, local.dv);
                    }),
            "context_attention: backward pass: expected an operator made with backward");
}

TEST(ContextAttention, RanksWithOtherShapesAreToldSo) {
  EXPECT_THROW(run_threads({.ranks = 2},
                           [&](Communicator& comm) {
                             const ContextShape shape{.seq = 8 + comm.rank(), .head_dim = 4};
                             ContextOperator attention(comm, shape, nullptr);
                           }),
               Mismatch);
}

TEST(ContextAttention, ReceiptsNameThePassesThatRan) {
  run_threads({.ranks = 2}, [&](Communicator& comm) {
    clear_receipts();
    const ContextCase c{
        .shape = {.seq = 64, .keys = 64, .heads = 2, .kv_heads = 2, .head_dim = 16}};
    const ContextProblem local(c, comm.size(), comm.rank());
    ContextOperator attention(comm, c.shape, nullptr);
    local.run(attention);
    EXPECT_THAT(kForms, testing::Contains(attention.forward_form()));
    EXPECT_THAT(kForms, testing::Contains(attention.backward_form()));
    const std::vector<Receipt> rows = receipts();
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].op, "context_attention");
    EXPECT_EQ(rows[1].op, "context_attention backward");
    EXPECT_EQ(rows[0].calls, 1);
    EXPECT_EQ(rows[0].ran == Strategy::serial, attention.forward_form() == "gather");
  });
}

TEST(ContextAttention, StrictOperatorsRefuseWhatDoesNotOverlap) {
  for (const int ranks : {1, 2}) {
    run_threads({.ranks = ranks}, [&](Communicator& comm) {
      const ContextShape shape{.seq = 64, .keys = 64, .heads = 2, .kv_heads = 2, .head_dim = 16};
      const auto error = [&](Strategy strategy, std::string_view form) {
        return error_of<Unsupported>([&] {
          const ContextOperator made(comm, shape, nullptr,
                                     {.strategy = strategy, .form = form, .strict = true});
        });
      };
      const std::string overlapped = error(Strategy::overlapped, ""),
                        ring = error(Strategy::automatic, "ring");
      // A form that is asked for by name asks for its own strategy.
      EXPECT_EQ(error(Strategy::automatic, "gather"), "");
      EXPECT_EQ(error(Strategy::serial, ""), "");
      if (ranks == 2) {
        EXPECT_EQ(overlapped + ring, "");
        EXPECT_THROW(ContextOperator(comm, shape, nullptr, {.strict = comm.rank() == 0}), Mismatch);
        return;
      }
      for (const std::string& text : {overlapped, ring}) {
        EXPECT_THAT(text, testing::StartsWith("context_attention: batch 1 seq 64 "));
        EXPECT_THAT(text, testing::HasSubstr("a group of 1 rank has nothing to overlap"));
      }
    });
  }
}

TEST(MergePartial, PartialsAreWeightedByTheirSums) {
  // Two keys in separate blocks, with values 1 and 3 and scores 0 and 2.
  const double weight = 1 / (1 + std::exp(2.0)), expected = weight * 1 + (1 - weight) * 3;
  float out = 1, log_sum = 0;
  const float local = 3;
  cpu::merge_partial(&out, log_sum, &local, 2, 1);
  EXPECT_NEAR(out, expected, 1e-6);
  EXPECT_NEAR(log_sum, std::log(1 + std::exp(2.0)), 1e-6);
  constexpr float kNoKeys = -std::numeric_limits<float>::infinity();
  cpu::merge_partial(&out, log_sum, &local, kNoKeys, 1);
  EXPECT_NEAR(out, expected, 1e-6);
  float none = 0, none_sum = kNoKeys;
  cpu::merge_partial(&none, none_sum, &local, kNoKeys, 1);
  EXPECT_EQ(none, 0);
  EXPECT_EQ(none_sum, kNoKeys);
}

// Two calls deep: keys and values (f32, 8 bytes a column) and their gradients of both ranks; with
// those that are sent, and a sum; then rows of queries (results, of local keys and of others; q,
// dout, log-sums and deltas).
TEST(ContextAttention, BytesAreThoseOfTheFormsThatMayBeChosen) {
  const ContextShape shape{.batch = 1, .seq = 64, .heads = 4, .kv_heads = 2, .head_dim = 16};
  const auto bytes = [&](std::string_view form, int ranks) {
    return context_attention_bytes(shape, ranks, {.form = form});
  };
  const size_t rows = 32, area = rows * 32 * 8;
  const size_t messages = 2 * (2 * (area + area) + area + 3 * area), queries = rows * 4 * 332;
  EXPECT_EQ(bytes("gather", 2),
            messages + queries + cpu::BlockAttention::bytes({1, 4, 2, 16, int64_t(rows)}));
  EXPECT_EQ(bytes("ring", 2), bytes("gather", 2));
  std::vector<size_t> all;
  for (const ContextFormRow* row : context_forms()) all.push_back(bytes(row->name, 2));
  std::ranges::sort(all);
  EXPECT_EQ(context_attention_bytes(shape, 2), all[all.size() - 1] + all[all.size() - 2]);
  EXPECT_THROW(bytes("heads", 4), InvalidArgument);
}

TEST(ContextAttention, OneRankGivesTheBitsOfLocalAttention) {
  const ContextCase c{
      .ranks = 1,
      .shape = {.batch = 2, .seq = 45, .keys = 45, .heads = 4, .kv_heads = 2, .head_dim = 16},
      .window = 9,
      .document = 12};
  const ContextProblem whole(c, 1, 0), local(c, 1, 0);
  run_one_process(whole);
  run_threads({.ranks = 1}, [&](Communicator& comm) {
    const RopeTable rope(Exec{}, c.shape.seq, c.shape.head_dim, kTheta);
    ContextOperator attention(comm, c.shape, &rope);
    local.run(attention);
  });
  EXPECT_EQ(local.result(), whole.result());
}

}  // namespace
}  // namespace tandem

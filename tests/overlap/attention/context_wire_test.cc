#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "overlap/attention/operator.h"
#include "overlap/attention/reference.h"
#include "tandem/error.h"
#include "tests/overlap/attention/problem.h"

namespace tandem {
namespace {
using namespace tandem::test;

/// Cases of 2 to 4 ranks whose heads `wire` divides into groups.
std::vector<ContextCase> cases_of(const Wire& wire, DType dtype) {
  std::vector<ContextCase> cases;
  for (ContextCase c : generate_cases(40, dtype)) {
    if (c.ranks < 2 || c.ranks > 4 || cases.size() == 6) continue;
    c.shape.head_dim = wire.group * (cases.size() % 2 == 0 ? 1 : 3);
    c.shape.wire = wire;
    cases.push_back(c);
  }
  return cases;
}

/// Rounds each head of a row to `wire`.
void round_heads(const Tensor& rows, const Wire& wire, int64_t head_dim) {
  std::vector<std::byte> message(wire.bytes(head_dim, rows.dtype()));
  for (int64_t row = 0; row < rows.dim(0); ++row) {
    for (int64_t c = 0; c < rows.dim(1); c += head_dim) {
      const auto offset = size_t(row * rows.stride(0) + c) * size_of(rows.dtype());
      const Tensor head(rows.as<std::byte>() + offset, rows.dtype(), {head_dim});
      encode(wire, head, message);
      decode(wire, message, head);
    }
  }
}

const char* const kWires[] = {"int8:g16",      "e4m3:g16",        "int4:g32:hadamard",
                              "int3:g16:asym", "int2:g32:spikes", "mxfp6"};

// Without a rotation the keys that travel are those of the call, so the result is that of a call
// with rounded keys and values and no wire format, bit for bit, in both passes.
TEST(ContextWire, EveryFormReadsTheRoundedKeysInBothPasses) {
  for (const char* text : kWires) {
    const Wire wire = Wire::parse(text);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const ContextCase& c : cases_of(wire, dtype)) {
        SCOPED_TRACE(text + c.describe());
        run_threads({.ranks = c.ranks}, [&](Communicator& comm) {
          ContextCase uncompressed = c;
          uncompressed.shape.wire = {};
          const ContextProblem rounded(uncompressed, comm.size(), comm.rank());
          for (const Tensor& rows : {rounded.k, rounded.v})
            round_heads(rows, wire, c.shape.head_dim);
          ContextOperator reference(comm, uncompressed.shape, nullptr, {.form = "gather"});
          rounded.run(reference);
          for (const ContextFormRow* form : context_forms()) {
            if (!form->refusal({c.shape, comm.size(), comm.rank()}).empty()) continue;
            ContextProblem local(c, comm.size(), comm.rank());
            ContextOperator attention(comm, c.shape, nullptr, {.form = form->name});
            for (int again = 0; again < 2; ++again) {
              local.clear();
              local.run(attention);
              EXPECT_EQ(local.result(), rounded.result()) << form->name;
            }
          }
        });
      }
    }
  }
}

TEST(ContextWire, RotatedKeysAreRoundedAfterTheirRotation) {
  const Wire wire = Wire::parse("int8:g16");
  for (const ContextCase& c : cases_of(wire, DType::f32)) {
    if (!c.shape.causal) continue;
    SCOPED_TRACE(c.describe());
    run_threads({.ranks = c.ranks}, [&](Communicator& comm) {
      const RopeTable rope(Exec{}, c.shape.seq, c.shape.head_dim, 100);
      std::vector<std::byte> first;
      for (const ContextFormRow* form : context_forms()) {
        if (!form->refusal({c.shape, comm.size(), comm.rank()}).empty()) continue;
        ContextProblem local(c, comm.size(), comm.rank());
        ContextOperator attention(comm, c.shape, &rope, {.form = form->name});
        local.run(attention);
        if (first.empty()) first = local.result();
        EXPECT_EQ(local.result(), first) << form->name;
        const ContextReference reference(comm, local.grid, &rope, local.forward());
        const double relative = 2 * reference.relative_bound(c.shape.keys);
        const auto rows = local.grid.queries(comm.rank());
        for (int64_t i = 0; i < rows.count(); ++i) {
          const auto query = reference.query(0, 0, rows.position(i));
          for (int64_t d = 0; d < c.shape.head_dim; ++d) {
            EXPECT_NEAR(element(local.out, i, d), query.out[size_t(d)],
                        relative * query.magnitude + 1e-6 * std::abs(query.out[size_t(d)]) + 1e-12);
          }
        }
      }
    });
  }
}

/// Largest ratio of a result's error to what docs/reference/wire-formats.md bounds for
/// `bounded_by`, with keys and values sent as `wire`. A group's error is at most b times its
/// absmax, so a score's at most d = scale |q|_1 b max |k|, a softmax's sum of differences e^2d - 1.
double error_over_bound(const Wire& wire, const Wire& bounded_by) {
  const ContextCase c{.ranks = 2,
                      .shape = {.seq = 24,
                                .keys = 40,
                                .heads = 4,
                                .kv_heads = 2,
                                .head_dim = 16,
                                .causal = false,
                                .wire = wire}};
  double worst = 0;
  run_threads({.ranks = c.ranks}, [&](Communicator& comm) {
    ContextCase exact = c;
    exact.shape.wire = {};
    const ContextProblem local(c, comm.size(), comm.rank());
    ContextOperator attention(comm, c.shape, nullptr, {.form = "ring", .backward = false});
    attention.forward(local.q, local.k, local.v, local.out, local.log_sums);
    const ContextReference reference(comm, {exact.shape, comm.size(), comm.rank()}, nullptr,
                                     local.forward());
    const ContextProblem whole(exact, 1, 0);
    const auto max_of = [](const Tensor& t) {
      double max = 0;
      for (int64_t i = 0; i < t.dim(0) * t.dim(1); ++i) {
        max = std::max(max, std::abs(element(t, i / t.dim(1), i % t.dim(1))));
      }
      return max;
    };
    const double b = bounded_by.error_bound(), max_k = max_of(whole.k), max_v = max_of(whole.v);
    double found = 0;
    const auto rows = local.grid.queries(comm.rank());
    for (int64_t i = 0; i < rows.count(); ++i) {
      for (int64_t h = 0; h < c.shape.heads; ++h) {
        double q = 0;
        for (int64_t d = 0; d < 16; ++d) q += std::abs(element(local.q, i, h * 16 + d));
        const double score = q * b * max_k / 4;  // scale: 1 / sqrt(head_dim)
        const double bound = (std::exp(2 * score) - 1) * (1 + b) * max_v + b * max_v + 1e-5;
        const auto query = reference.query(0, h, rows.position(i));
        for (int64_t d = 0; d < 16; ++d) {
          const double error = std::abs(element(local.out, i, h * 16 + d) - query.out[size_t(d)]);
          found = std::max(found, error / bound);
        }
      }
    }
    if (comm.rank() == 0) worst = found;
  });
  return worst;
}

TEST(ContextWire, ResultsAreWithinTheBoundOfTheFormat) {
  for (const char* text : {"int8:g16", "e4m3:g16", "int5:g16", "int4:g16"}) {
    const Wire wire = Wire::parse(text);
    EXPECT_LE(error_over_bound(wire, wire), 1) << text;
  }
  EXPECT_GT(error_over_bound(Wire::parse("int2:g16"), Wire::parse("int8:g16")), 1)
      << "a bound that no error exceeds";
}

TEST(ContextWire, SendsTheBytesOfItsFormulas) {
  for (const char* text : kWires) {
    const Wire wire = Wire::parse(text);
    for (const ContextCase& c : cases_of(wire, DType::f32)) {
      SCOPED_TRACE(text + c.describe());
      run_threads({.ranks = c.ranks}, [&](Communicator& comm) {
        for (const ContextFormRow* form : context_forms()) {
          if (!form->refusal({c.shape, comm.size(), comm.rank()}).empty()) continue;
          const ContextProblem local(c, comm.size(), comm.rank());
          ContextOperator attention(comm, c.shape, nullptr, {.form = form->name});
          const uint64_t before = comm.bytes_sent();
          local.run(attention);
          EXPECT_EQ(comm.bytes_sent() - before,
                    uint64_t(form->sent_bytes(ContextPass::forward, attention.grid(), c.window) +
                             form->sent_bytes(ContextPass::backward, attention.grid(), c.window)))
              << form->name;
        }
      });
    }
  }
  // n ranks, rows of 128 positions: an eighth more than a byte an element, with scales of 2 bytes.
  ContextShape shape{.seq = 512,
                     .keys = 512,
                     .heads = 4,
                     .kv_heads = 4,
                     .head_dim = 16,
                     .causal = false,
                     .wire = Wire::parse("int8:g16")};
  const int64_t columns = 64, sent = 3 * 128 * 2 * columns;
  EXPECT_EQ(kRingForm.sent_bytes(ContextPass::forward, {shape, 4, 0}, 0), sent * 9 / 8);
  EXPECT_EQ(kRingForm.sent_bytes(ContextPass::backward, {shape, 4, 0}, 0), sent * 9 / 8 + sent * 4);
}

TEST(ContextWire, FormatsThatHeadsCannotHaveAreRefused) {
  const auto refusal = [](const char* wire) {
    try {
      run_threads({.ranks = 2}, [&](Communicator& comm) {
        ContextOperator attention(comm, {.seq = 8, .head_dim = 24, .wire = Wire::parse(wire)},
                                  nullptr);
      });
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_EQ(refusal("int8:g16"),
            "context_attention: wire int8:g16: expected groups that divide head_dim 24, not 16 "
            "elements");
  EXPECT_EQ(refusal("lossless"),
            "context_attention: wire lossless: expected a format with groups, whose bytes are "
            "known");
}

TEST(ContextWire, OneRankRoundsNothing) {
  ContextCase c{.ranks = 1,
                .shape = {.seq = 9, .keys = 9, .heads = 2, .kv_heads = 2, .head_dim = 16}};
  const ContextProblem uncompressed(c, 1, 0);
  c.shape.wire = Wire::parse("int2:g16");
  const ContextProblem local(c, 1, 0);
  run_threads({.ranks = 1}, [&](Communicator& comm) {
    for (const ContextProblem* problem : {&uncompressed, &local}) {
      ContextOperator attention(comm, problem->grid.shape, nullptr);
      problem->run(attention);
    }
  });
  EXPECT_EQ(local.result(), uncompressed.result());
}

}  // namespace
}  // namespace tandem

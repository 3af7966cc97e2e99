// Every operator compared with a GEMM in double, and every plan with the serial one, bit by bit.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>

#include "gemm/gemm.h"
#include "overlap/ag_gemm/reference.h"
#include "overlap/ag_wgrad/reference.h"
#include "overlap/gemm_ar/reference.h"
#include "overlap/gemm_rs/reference.h"
#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{0, 4, 4}, {1, 1, 1},    {2, 5, 3},    {3, 1, 7},    {5, 0, 3},
                           {4, 6, 0}, {17, 33, 29}, {64, 48, 32}, {131, 70, 65}};
constexpr OverlapOptions kPlans[] = {{Strategy::serial, 0},
                                     {Strategy::overlapped, 1},
                                     {Strategy::overlapped, 3},
                                     {Strategy::overlapped, 0}};

struct Variant {
  DType dtype;
  bool bias, transposed, padded, f32_out;
};
std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (int bits = 0; bits < 4; ++bits) {
      const bool bias = bits & 1, transposed = bits & 2;
      all.push_back({dtype, bias, transposed, bias != transposed, bits == 3});
    }
  }
  return all;
}

std::string describe(const Size& s, const Variant& v, const OverlapOptions& o) {
  return fmt::format("m {} n {} k {} {} bias {} transposed {} padded {} f32 out {}, {} chunks {}",
                     s.m, s.n, s.k, name_of(v.dtype), v.bias, v.transposed, v.padded, v.f32_out,
                     name_of(o.strategy), o.chunks);
}

/// Row by row; computed once for all plans of a problem.
template <typename Expect>
std::vector<Expected> expected_of(int64_t rows, int64_t columns, const Expect& expect) {
  std::vector<Expected> all;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) all.push_back(expect(i, j));
  }
  return all;
}

/// Fails unless every element is within the error of accumulation in f32 and of the roundings of
/// intermediate values.
void expect_near(const Tensor& out, int64_t terms, DType wire, int running_roundings,
                 const std::vector<Expected>& expected) {
  for (int64_t i = 0; i < out.dim(0); ++i) {
    for (int64_t j = 0; j < out.dim(1); ++j) {
      const Expected& e = expected[size_t(i * out.dim(1) + j)];
      ASSERT_NEAR(at(out, i, j), e.value, e.bound(terms, wire, running_roundings, out.dtype()))
          << "at " << i << ", " << j;
    }
  }
}

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values;
  for (int64_t i = 0; i < tensor.dim(0); ++i) {
    for (int64_t j = 0; j < tensor.dim(1); ++j) values.push_back(at(tensor, i, j));
  }
  return values;
}

// The last dimension split over ranks differs by rank, like a vocabulary of 257 over 2.
int64_t uneven(int64_t total, int rank) {
  return total == 0 ? 0 : total + (rank % 2);
}

struct AgProblem {
  Matrix x, weight, bias;
  Shard local;
  AgProblem(const Communicator& comm, const Size& s, const Variant& v)
      : x(v.dtype, s.m, s.k, 1),
        weight(v.dtype, uneven(s.n, comm.rank()), s.k, 100 + uint64_t(comm.rank()), v.transposed,
               v.padded ? 3 : 0),
        bias(v.f32_out ? DType::f32 : v.dtype, 1, uneven(s.n, comm.rank()), 7),
        local(shard_of(s.m, comm.size(), comm.rank())) {}
};

class Operators : public OnRanks {};

TEST_P(Operators, AgGemmMatchesReference) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const Variant& v : variants()) {
      for (const Size& s : kSizes) {
        std::vector<std::byte> serial;
        const AgProblem p(comm, s, v);
        const Tensor bias = p.bias.vector();
        const int64_t n = p.weight.tensor().dim(0);
        const DType out_type = v.f32_out ? DType::f32 : v.dtype;
        const auto expected = expected_of(s.m, n, [&](int64_t i, int64_t j) {
          Expected e;
          if (v.bias) e.add(p.bias.at(0, j));
          for (int64_t l = 0; l < s.k; ++l) e.add(p.x.at(i, l) * p.weight.at(j, l));
          return e;
        });
        for (const OverlapOptions& o : kPlans) {
          SCOPED_TRACE(describe(s, v, o));
          const Matrix operand(v.dtype, s.m, s.k, 1, false, v.padded ? 2 : 0);
          const Matrix out(out_type, s.m, n, 8, false, v.padded ? 5 : 0);
          AgGemm op(comm,
                    {.m = s.m,
                     .n = n,
                     .k = s.k,
                     .dtype = v.dtype,
                     .keep_gathered = v.transposed,
                     .bias = v.bias,
                     .weight_kn = v.transposed},
                    o);
          EXPECT_EQ(op.strategy(), o.strategy);
          op.run(operand.tensor().rows(p.local.begin, p.local.count), p.weight.tensor(),
                 out.tensor(), v.bias ? &bias : nullptr);
          expect_near(out.tensor(), s.k, DType::f32, 0, expected);
          if (v.transposed) {
            EXPECT_EQ(bytes_of(op.gathered()), bytes_of(p.x.tensor()));
          }
          const auto bits = bytes_of(out.tensor());
          if (o.strategy == Strategy::serial) serial = bits;
          EXPECT_TRUE(bits == serial || !rows_keep_bits());
        }
        const Matrix out(out_type, s.m, n, 8, false, v.padded ? 5 : 0);
        ag_gemm_reference(comm, p.x.tensor().rows(p.local.begin, p.local.count), p.weight.tensor(),
                          out.tensor(), v.bias ? &bias : nullptr);
        EXPECT_TRUE(bytes_of(out.tensor()) == serial || !rows_keep_bits()) << "unfused reference";
      }
    }
  });
}

/// Inputs of every rank, for GEMM+RS and GEMM+AR.
struct SumProblem {
  std::vector<std::unique_ptr<Matrix>> x, weight;
  Matrix bias;
  SumProblem(const Communicator& comm, const Size& s, const Variant& v)
      : bias(v.f32_out ? DType::f32 : v.dtype, 1, s.n, 7) {
    for (int r = 0; r < comm.size(); ++r) {
      x.push_back(std::make_unique<Matrix>(v.dtype, s.m, uneven(s.k, r), 10 + uint64_t(r), false,
                                           v.padded ? 2 : 0));
      weight.push_back(std::make_unique<Matrix>(v.dtype, s.n, uneven(s.k, r), 100 + uint64_t(r),
                                                v.transposed, v.padded ? 3 : 0));
    }
  }
  Expected at(const Variant& v, int64_t i, int64_t j) const {
    Expected e;
    if (v.bias) e.add(bias.at(0, j));
    for (size_t r = 0; r < x.size(); ++r) {
      const int64_t k = x[r]->tensor().dim(1);
      Expected partial;
      for (int64_t l = 0; l < k; ++l) partial.add(x[r]->at(i, l) * weight[r]->at(j, l));
      e.add_partial(partial, k, v.dtype);
    }
    return e;
  }
};

TEST_P(Operators, GemmRsMatchesReference) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const Variant& v : variants()) {
      for (const Size& s : kSizes) {
        const SumProblem p(comm, s, v);
        const Tensor bias = p.bias.vector();
        const auto& x = p.x[size_t(comm.rank())]->tensor();
        const auto& weight = p.weight[size_t(comm.rank())]->tensor();
        const Shard local = shard_of(s.m, comm.size(), comm.rank());
        const DType out_type = v.f32_out ? DType::f32 : v.dtype;
        const auto expected = expected_of(
            local.count, s.n, [&](int64_t i, int64_t j) { return p.at(v, local.begin + i, j); });
        // The reference rounds the sum too, before it adds the bias.
        const auto check = [&](const Tensor& out, int running_roundings = 0) {
          expect_near(out, s.k * comm.size(), v.dtype, running_roundings, expected);
        };
        std::vector<std::byte> serial;
        for (const OverlapOptions& o : kPlans) {
          SCOPED_TRACE(describe(s, v, o));
          const Matrix out(out_type, local.count, s.n, 8, false, v.padded ? 5 : 0);
          GemmRs op(comm, {s.m, s.n, x.dim(1), v.dtype, v.bias, v.transposed}, o);
          op.run(x, weight, out.tensor(), v.bias ? &bias : nullptr);
          check(out.tensor());
          const auto bits = bytes_of(out.tensor());
          if (o.strategy == Strategy::serial) serial = bits;
          EXPECT_TRUE(bits == serial || !rows_keep_bits());
        }
        const Matrix out(out_type, local.count, s.n, 9);
        gemm_rs_reference(comm, x, weight, out.tensor(), v.bias ? &bias : nullptr);
        check(out.tensor(), 2);
      }
    }
  });
}

TEST_P(Operators, GemmArMatchesReference) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (Variant v : variants()) {
      v.f32_out = false;
      for (const Size& s : kSizes) {
        const SumProblem p(comm, s, v);
        const Tensor bias = p.bias.vector();
        const auto& x = p.x[size_t(comm.rank())]->tensor();
        const auto& weight = p.weight[size_t(comm.rank())]->tensor();
        const auto expected =
            expected_of(s.m, s.n, [&](int64_t i, int64_t j) { return p.at(v, i, j); });
        // The reference rounds the sum too, before it adds the bias.
        const auto check = [&](const Tensor& out, int running_roundings = 0) {
          expect_near(out, s.k * comm.size(), v.dtype, running_roundings, expected);
        };
        std::vector<std::byte> serial;
        for (const OverlapOptions& o : kPlans) {
          SCOPED_TRACE(describe(s, v, o));
          const Matrix out(v.dtype, s.m, s.n, 8, false, v.padded ? 5 : 0);
          GemmAr op(comm, {s.m, s.n, x.dim(1), v.dtype, v.bias, v.transposed}, o);
          op.run(x, weight, out.tensor(), v.bias ? &bias : nullptr);
          check(out.tensor());
          const auto bits = bytes_of(out.tensor());
          if (o.strategy == Strategy::serial) serial = bits;
          EXPECT_TRUE(bits == serial || !rows_keep_bits());
          for (const auto& other : comm.exchange(bits, "bits")) EXPECT_EQ(other, bits);
        }
        const Matrix out(v.dtype, s.m, s.n, 9);
        gemm_ar_reference(comm, x, weight, out.tensor(), v.bias ? &bias : nullptr);
        check(out.tensor(), 2);
      }
    }
  });
}

TEST_P(Operators, AgWgradMatchesReference) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const bool transposed : {false, true}) {
        std::vector<Size> sizes(std::begin(kSizes), std::end(kSizes));
        sizes.push_back({4099, 5, 3});  // shards of two and more chunks
        for (const Size& s : sizes) {
          const int64_t n = uneven(s.n, comm.rank());
          const Matrix x(dtype, s.m, s.k, 1), dy(dtype, s.m, n, 50 + uint64_t(comm.rank()));
          const Matrix before(DType::f32, n, s.k, 3, transposed);
          const Shard local = shard_of(s.m, comm.size(), comm.rank());
          const auto expected = expected_of(n, s.k, [&](int64_t i, int64_t j) {
            Expected e;
            e.add(before.at(i, j));
            for (int64_t l = 0; l < s.m; ++l) e.add(dy.at(l, i) * x.at(l, j));
            return e;
          });
          const auto check = [&](const Tensor& dw) {
            expect_near(dw, s.m + comm.size(), DType::f32, 0, expected);
          };
          std::vector<std::byte> serial;
          for (const OverlapOptions& o : kPlans) {
            SCOPED_TRACE(describe(s, {dtype, false, transposed, false, true}, o));
            const Matrix dw(DType::f32, n, s.k, 3, transposed);
            AgWgrad op(comm, {.m = s.m, .n = n, .k = s.k, .dtype = dtype, .weight_kn = transposed},
                       o);
            op.run(x.tensor().rows(local.begin, local.count), dy.tensor(), dw.tensor());
            check(dw.tensor());
            const auto bits = bytes_of(transposed ? dw.tensor().transposed() : dw.tensor());
            if (o.strategy == Strategy::serial) serial = bits;
            EXPECT_EQ(bits, serial);
            const Matrix stored(DType::f32, n, s.k, 4, transposed),
                added(DType::f32, n, s.k, 4, transposed);
            std::fill_n(added.tensor().as<float>(), added.tensor().elements(), 0.0f);
            for (const Matrix* to : {&stored, &added}) {
              op.run(x.tensor().rows(local.begin, local.count), dy.tensor(), to->tensor(),
                     to == &added);
            }
            EXPECT_EQ(values_of(stored.tensor()), values_of(added.tensor()));
          }
          const Matrix dw(DType::f32, n, s.k, 3, transposed);
          ag_wgrad_reference(comm, x.tensor().rows(local.begin, local.count), dy.tensor(),
                             dw.tensor());
          check(dw.tensor());
        }
      }
    }
  });
}

/// Sleeps for up to 300 us, differently on every rank and call.
void stumble(int rank, int call) {
  const auto word = philox(99, uint64_t(rank), uint64_t(call))[0];
  if (word % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(word % 300));
}

// Thousands of calls of operators that share only the communicator, ranks out of step, each result
// compared with the first of its kind and inputs: an overwritten half or a stale signal would be
// detected, as outputs are cleared first and consecutive calls of a kind have different inputs.
TEST_P(Operators, BackToBackCallsKeepTheirBits) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const int rank = comm.rank(), world = comm.size();
    struct Kind {
      struct Inputs {
        Matrix x, rs_x, dy;
        std::vector<std::byte> first[4];
      };
      std::vector<Inputs> inputs;
      Matrix weight;
      DType dtype;
      Size size;
      Shard local;
      AgGemm ag;
      GemmRs rs;
      GemmAr ar;
      AgWgrad wgrad;
      Kind(Communicator& c, Size s, DType t, OverlapOptions o)
          : weight(t, s.n, s.k, 2 + uint64_t(c.rank())),
            dtype(t),
            size(s),
            local(shard_of(s.m, c.size(), c.rank())),
            ag(c, {s.m, s.n, s.k, t, o.chunks == 2}, o),
            rs(c, {s.m, s.n, s.k, t}, o),
            ar(c, {s.m, s.n, s.k, t}, o),
            wgrad(c, {s.m, s.n, s.k, t}, o) {
        const uint64_t rank_seed = uint64_t(c.rank());
        for (const uint64_t set : {0, 100, 200}) {
          inputs.push_back({Matrix(t, s.m, s.k, set + 1),
                            Matrix(t, s.m, s.k, set + 20 + rank_seed),
                            Matrix(t, s.m, s.n, set + 30 + rank_seed),
                            {}});
        }
      }
    };
    std::vector<std::unique_ptr<Kind>> kinds;
    kinds.push_back(std::make_unique<Kind>(comm, Size{9, 8, 5}, DType::f32,
                                           OverlapOptions{Strategy::overlapped, 2}));
    kinds.push_back(std::make_unique<Kind>(comm, Size{2, 16, 8}, DType::bf16,
                                           OverlapOptions{Strategy::overlapped, 4}));
    kinds.push_back(std::make_unique<Kind>(comm, Size{24, 3, 16}, DType::f32,
                                           OverlapOptions{Strategy::serial, 0}));
    const int calls = mpi_world() ? 200 : 400;  // of all four operators
    for (int call = 0; call < calls; ++call) {
      Kind& kind = *kinds[size_t(call) % kinds.size()];
      Kind::Inputs& in = kind.inputs[size_t(call) / kinds.size() % kind.inputs.size()];
      const Tensor x = in.x.tensor().rows(kind.local.begin, kind.local.count);
      const auto& [m, n, k] = kind.size;
      if (world > 1) stumble(rank, call);
      const Matrix ag_out(kind.dtype, m, n, 3), rs_out(kind.dtype, kind.local.count, n, 5),
          ar_out(kind.dtype, m, n, 6), dw(DType::f32, n, k, 8);
      kind.ag.run(x, kind.weight.tensor(), ag_out.tensor());
      kind.rs.run(in.rs_x.tensor(), kind.weight.tensor(), rs_out.tensor());
      kind.ar.run(in.rs_x.tensor(), kind.weight.tensor(), ar_out.tensor());
      kind.wgrad.run(x, in.dy.tensor(), dw.tensor());
      const std::vector<std::byte> bits[] = {bytes_of(ag_out.tensor()), bytes_of(rs_out.tensor()),
                                             bytes_of(ar_out.tensor()), bytes_of(dw.tensor())};
      for (size_t i = 0; i < 4; ++i) {
        if (in.first[i].empty()) in.first[i] = bits[i];
        ASSERT_EQ(bits[i], in.first[i]) << "operator " << i << " call " << call;
      }
    }
  });
}

// Rank 0 has almost nothing to multiply, so that it is a call ahead of the others: its sends must
// not overwrite what they still use. No other operator runs in between, which would delay it.
// Inputs are overwritten as soon as their call has returned: data in flight is not read from them.
TEST_P(Operators, RanksMayRunOneCallAhead) {
  if (ranks() == 1) GTEST_SKIP() << "nobody to be ahead of";
  run([](Communicator& comm) {
    set_kernel_threads(1);
    constexpr int64_t kM = 96, kShared = 24;
    const int64_t local_size = comm.rank() == 0 ? 1 : 500;
    const uint64_t rank = uint64_t(comm.rank());
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    std::vector<Matrix> dys, wide_xs;
    for (const uint64_t set : {0, 100, 200}) {
      dys.emplace_back(DType::f32, kM, local_size, set + 20 + rank);
      wide_xs.emplace_back(DType::f32, kM, local_size, set + 40 + rank);
    }
    const Matrix weight(DType::f32, local_size, kShared, 60 + rank),
        wide(DType::f32, kShared, local_size, 80);
    const OverlapOptions plan{Strategy::overlapped, 2};
    AgGemm ag(comm, {kM, local_size, kShared}, plan);
    GemmRs rs(comm, {kM, kShared, local_size}, plan);
    GemmAr ar(comm, {kM, kShared, local_size}, plan);
    AgWgrad wgrad(comm, {kM, local_size, kShared}, plan);
    const Matrix ag_out(DType::f32, kM, local_size, 0), rs_out(DType::f32, local.count, kShared, 0),
        ar_out(DType::f32, kM, kShared, 0);
    const auto expect_bits = [&](const char* name, const auto& call) {
      std::vector<std::byte> alone[3];
      for (size_t set = 0; set < 3; ++set) {
        comm.barrier();
        alone[set] = bytes_of(call(set));
      }
      comm.barrier();
      for (size_t i = 0; i < 60; ++i) {
        ASSERT_TRUE(bytes_of(call(i % 3)) == alone[i % 3]) << name << " call " << i;
      }
    };
    const auto with_x = [&](size_t set, const auto& run) {
      const Matrix x(DType::f32, local.count, kShared, 100 * set + 1 + rank);
      run(x.tensor());
      std::fill_n(x.tensor().as<float>(), x.tensor().elements(), std::nanf(""));
    };
    expect_bits("ag_gemm", [&](size_t set) {
      with_x(set, [&](const Tensor& x) { ag.run(x, weight.tensor(), ag_out.tensor()); });
      return ag_out.tensor();
    });
    expect_bits("gemm_rs", [&](size_t set) {
      rs.run(wide_xs[set].tensor(), wide.tensor(), rs_out.tensor());
      return rs_out.tensor();
    });
    expect_bits("gemm_ar", [&](size_t set) {
      ar.run(wide_xs[set].tensor(), wide.tensor(), ar_out.tensor());
      return ar_out.tensor();
    });
    Matrix dw(DType::f32, local_size, kShared, 0);
    expect_bits("ag_wgrad", [&](size_t set) {
      dw = Matrix(DType::f32, local_size, kShared, 0);
      with_x(set, [&](const Tensor& x) { wgrad.run(x, dys[set].tensor(), dw.tensor()); });
      return dw.tensor();
    });
  });
}

TANDEM_INSTANTIATE(Operators);

}  // namespace
}  // namespace tandem::test

// The router's kernels on a GPU match those on the CPU; every call has equal bits.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/router.h"
#include "tandem/random.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class RouterKernels : public OnGpus {};

/// A router's rows on the host and on a GPU.
struct Rows {
  int64_t rows, experts;
  RouterOptions options;
  std::vector<float> logits, bias, scores, weights, dweights, balance;
  std::vector<int32_t> chosen;

  Rows(int64_t rows_, int64_t experts_, const RouterOptions& o, uint64_t seed)
      : rows(rows_), experts(experts_), options(o), scores(size_t(rows_ * experts_)) {
    const auto fill = [&](std::vector<float>& values, int64_t count, uint64_t stream) {
      for (int64_t i = 0; i < count; ++i) values.push_back(normal(seed, stream, uint64_t(i)));
    };
    fill(logits, rows * experts, 1);
    fill(dweights, rows * o.top_k, 2);
    fill(balance, experts, 3);
    fill(bias, experts, 4);
    weights.resize(dweights.size());
    chosen.resize(dweights.size());
    if (rows > 4) logits[size_t(4 * experts)] = std::numeric_limits<float>::infinity();
    route_forward(Exec{}, matrix_of(logits, experts), vector_of(bias), o,
                  matrix_of(scores, experts), matrix_of(chosen, o.top_k),
                  matrix_of(weights, o.top_k));
  }
  template <typename T>
  Tensor matrix_of(std::vector<T>& values, int64_t columns) const {
    return Tensor::of(std::span(values), {rows, columns});
  }
  static Tensor vector_of(std::vector<float>& values) {
    return Tensor::of(std::span(values), {int64_t(values.size())});
  }
};

/// Copy of a host tensor on exec's device.
struct OnDevice {
  OnDevice(const Exec& exec, const Tensor& host) : memory(host.bytes(), exec.device) {
    tensor = host.dims() == 1 ? memory.view(host.dtype(), {host.dim(0)})
                              : memory.view(host.dtype(), {host.dim(0), host.dim(1)});
    copy(exec, host, tensor);
  }
  Memory memory;
  Tensor tensor;
};

template <typename T>
std::vector<T> to_host(const Exec& exec, const Tensor& tensor) {
  std::vector<T> values(tensor.bytes() / sizeof(T));
  copy(exec, tensor, Tensor(values.data(), tensor.dtype(), {tensor.elements()}));
  return values;
}

template <typename Body>
void for_each_router(const Body& body) {
  uint64_t seed = 0;
  for (const int64_t experts : {1, 3, 8, 64, 65, 128, 256, 257, 1024}) {
    for (const int top_k : {1, 2, 8, 33}) {
      if (top_k > experts) continue;
      for (const int form : {0, 1, 2, 3}) {
        const RouterOptions options{top_k, form % 2 == 1, form < 2, form == 3 ? 2.5f : 1.0f};
        for (const int64_t rows : {0, 1, 37, 2500}) {
          if (rows * experts > 300000) continue;
          body(Rows(rows, experts, options, ++seed));
        }
      }
    }
  }
}

TEST_P(RouterKernels, BackwardMatchesTheCpu) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for_each_router([&](Rows r) {
      for (const bool balanced : {false, true}) {
        const Tensor balance = balanced ? Rows::vector_of(r.balance) : Tensor();
        std::vector<float> expected(r.scores.size(), NAN);
        route_backward(Exec{}, r.matrix_of(r.scores, r.experts),
                       r.matrix_of(r.chosen, r.options.top_k),
                       r.matrix_of(r.dweights, r.options.top_k), balance, r.options,
                       r.matrix_of(expected, r.experts));
        const OnDevice scores(exec, r.matrix_of(r.scores, r.experts)),
            chosen(exec, r.matrix_of(r.chosen, r.options.top_k)),
            dweights(exec, r.matrix_of(r.dweights, r.options.top_k)),
            on_balance(exec, Rows::vector_of(r.balance)),
            dlogits(exec, r.matrix_of(r.logits, r.experts));
        std::vector<float> once;
        for (int call = 0; call < 2; ++call) {
          route_backward(exec, scores.tensor, chosen.tensor, dweights.tensor,
                         balanced ? on_balance.tensor : Tensor(), r.options, dlogits.tensor);
          const auto found = to_host<float>(exec, dlogits.tensor);
          if (call == 1) {
            EXPECT_TRUE(found == once);
            continue;
          }
          once = found;
          for (size_t i = 0; i < found.size(); ++i) {
            ASSERT_NEAR(found[i], expected[i], 1e-6 * std::abs(expected[i]) + 1e-9)
                << r.options.top_k << " of " << r.experts << ", row " << i / size_t(r.experts);
          }
        }
      }
    });
  });
}

TEST_P(RouterKernels, LoadMatchesTheCpu) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for_each_router([&](Rows r) {
      const int64_t bytes = router_load_bytes(r.experts);
      Memory expected(size_t(2 * bytes)), found(size_t(2 * bytes), exec.device);
      const auto loads = [&](const Memory& memory) { return memory.view(DType::u8, {2, bytes}); };
      const OnDevice scores(exec, r.matrix_of(r.scores, r.experts)),
          chosen(exec, r.matrix_of(r.chosen, r.options.top_k));
      for (int call = 0; call < 3; ++call) {  // loads add up; the second layer has two thirds
        for (int64_t layer = 0; layer < (call < 2 ? 2 : 1); ++layer) {
          add_router_load(Exec{}, r.matrix_of(r.scores, r.experts),
                          r.matrix_of(r.chosen, r.options.top_k), loads(expected).rows(layer, 1));
          add_router_load(exec, scores.tensor, chosen.tensor, loads(found).rows(layer, 1));
        }
      }
      add_loads(Exec{}, loads(expected).rows(0, 1), loads(expected).rows(1, 1));
      add_loads(exec, loads(found).rows(0, 1), loads(found).rows(1, 1));
      const auto sums = to_host<double>(exec, loads(found));
      for (size_t i = 0; i < sums.size(); ++i) {
        const double right = reinterpret_cast<double*>(expected.data())[i];
        const bool is_count = i / size_t(r.experts) % 2 == 0;
        ASSERT_NEAR(sums[i], right, is_count ? 0 : 3e-7 * right + 2e-8 * double(r.rows)) << i;
      }

      const AuxLoss loss{0.01, r.experts, r.options.top_k};
      const OnDevice balance(exec, Rows::vector_of(r.balance)), bias(exec, Rows::vector_of(r.bias));
      const Memory expected_total(8), total(8, exec.device);
      for (int64_t layer = 0; layer < 2; ++layer) {
        balance_gradient(Exec{}, loss, loads(expected).rows(layer, 1), Rows::vector_of(r.balance));
        balance_gradient(exec, loss, loads(found).rows(layer, 1), balance.tensor);
        EXPECT_EQ(to_host<float>(exec, balance.tensor), r.balance) << r.experts;
        adjust_router_bias(Exec{}, loads(expected).rows(layer, 1), 0.25f, Rows::vector_of(r.bias));
        adjust_router_bias(exec, loads(found).rows(layer, 1), 0.25f, bias.tensor);
        EXPECT_EQ(to_host<float>(exec, bias.tensor), r.bias) << r.experts;
      }
      for (int call = 0; call < 2; ++call) {
        add_aux_losses(Exec{}, loss, loads(expected), expected_total.view(DType::u8, {8}));
        add_aux_losses(exec, loss, loads(found), total.view(DType::u8, {8}));
      }
      const double right = *reinterpret_cast<double*>(expected_total.data());
      // The loss weights a row's probabilities with coefficient x experts / rows altogether, and
      // both round them by up to 2^-29.
      const double rounded = 2 * 2 * loss.coefficient * double(r.experts) * std::ldexp(1, -28);
      EXPECT_NEAR(to_host<double>(exec, total.view(DType::u8, {8}))[0], right,
                  3e-7 * right + rounded)
          << r.experts << " experts, " << r.rows << " rows";
    });
  });
}

/// Routing and gradients of a router's rows on a GPU, and its load.
struct OnGpu {
  std::vector<float> scores, weights, dlogits;
  std::vector<int32_t> chosen;
  std::vector<double> load;

  OnGpu(const Exec& exec, Rows& r, const Tensor& tokens) {
    const OnDevice logits(exec, r.matrix_of(r.logits, r.experts)), bias(exec, r.vector_of(r.bias)),
        all_scores(exec, r.matrix_of(r.scores, r.experts)),
        all_chosen(exec, r.matrix_of(r.chosen, r.options.top_k)),
        all_weights(exec, r.matrix_of(r.weights, r.options.top_k)),
        dweights(exec, r.matrix_of(r.dweights, r.options.top_k)),
        balance(exec, r.vector_of(r.balance)), all_dlogits(exec, r.matrix_of(r.logits, r.experts));
    const Memory sums(size_t(router_load_bytes(r.experts)), exec.device);
    const Tensor all_load = sums.view(DType::u8, {1, router_load_bytes(r.experts)});
    route_forward(exec, logits.tensor, bias.tensor, r.options, all_scores.tensor, all_chosen.tensor,
                  all_weights.tensor, tokens);
    add_router_load(exec, all_scores.tensor, all_chosen.tensor, all_load);
    route_backward(exec, all_scores.tensor, all_chosen.tensor, dweights.tensor, balance.tensor,
                   r.options, all_dlogits.tensor);
    scores = to_host<float>(exec, all_scores.tensor);
    weights = to_host<float>(exec, all_weights.tensor);
    dlogits = to_host<float>(exec, all_dlogits.tensor);
    chosen = to_host<int32_t>(exec, all_chosen.tensor);
    load = to_host<double>(exec, all_load);
  }
};

TEST_P(RouterKernels, PaddingIsLeftOut) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    uint64_t number = 0;
    for_each_router([&](Rows r) {
      ++number;
      std::vector<int32_t> tokens;
      for (uint64_t row = 0; row < uint64_t(r.rows); ++row) {
        tokens.push_back(philox(7, number, row)[0] % 10 < number % 11 ? -1 : int32_t(row));
      }
      for (size_t row = 0; row < tokens.size(); ++row) {  // has no gradient, as from experts
        if (tokens[row] >= 0) continue;
        std::fill_n(r.dweights.begin() + long(row) * r.options.top_k, r.options.top_k, 0.f);
      }
      const OnDevice on_tokens(exec, Tensor::of(std::span(tokens), {r.rows}));
      OnGpu padded(exec, r, on_tokens.tensor);
      const OnGpu all(exec, r, {});
      const auto expect_left_out = [&](const auto& found, const auto& without, auto none) {
        const size_t width = r.rows == 0 ? 1 : found.size() / size_t(r.rows);
        for (size_t i = 0; i < found.size(); ++i) {
          const auto expected = tokens[i / width] < 0 ? none : without[i];
          const bool has_same_bits = std::memcmp(&found[i], &expected, sizeof expected) == 0;
          ASSERT_TRUE(found[i] == expected || has_same_bits)  // also NaN
              << r.options.top_k << " of " << r.experts << ", row " << i / width;
        }
      };
      expect_left_out(padded.scores, all.scores, 0.f);
      expect_left_out(padded.weights, all.weights, 0.f);
      expect_left_out(padded.dlogits, all.dlogits, 0.f);
      expect_left_out(padded.chosen, all.chosen, -1);
      std::vector<double> expected(padded.load.size());
      add_router_load(Exec{}, r.matrix_of(padded.scores, r.experts),
                      r.matrix_of(padded.chosen, r.options.top_k),
                      Tensor(expected.data(), DType::u8, {1, router_load_bytes(r.experts)}));
      for (size_t i = 0; i < expected.size(); ++i) {
        const double error = 3e-7 * expected[i] + 2e-8 * double(r.rows);
        ASSERT_NEAR(padded.load[i], expected[i], i < size_t(r.experts) ? 0 : error) << i;
      }
    });
  });
}

TEST_P(RouterKernels, TooManyExpertsAreRefusedByName) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const Memory memory(4 * 2048, exec.device);
    const Tensor logits = memory.view(DType::f32, {1, 1025}),
                 chosen = memory.view(DType::i32, {1, 1});
    const auto error_of = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return "no error";
    };
    EXPECT_EQ(error_of([&] { route_forward(exec, logits, {}, {}, logits, chosen, chosen); }),
              "route: 1 of 1025 experts: expected 1 to all of at most 1024");
    EXPECT_EQ(error_of([&] { add_router_load(exec, logits, chosen, logits); }),
              "router load: 1025 experts: expected 1 to 1024");
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, RouterKernels, testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test

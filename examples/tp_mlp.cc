// A tensor-parallel MLP, y = relu(x W1^T) W2^T, forward and backward: ranks share the rows of x and
// y (sequence parallelism) and the hidden features (tensor parallelism). The backward of AgGemm is
// a GemmRs and vice versa.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "tandem/tandem.h"

using namespace tandem;

int main() {
  constexpr int64_t kM = 24, kIn = 16, kHidden = 40;
  bool correct = true;
  WorldOptions world;
  if (!launched()) world.ranks = 2;

  run_world(world, [&](Communicator& comm) {
    const Shard rows = shard_of(kM, comm.size(), comm.rank());
    const int64_t n = shard_of(kHidden, comm.size(), comm.rank()).count;
    std::vector<std::vector<float>> memory;
    const auto tensor = [&](int64_t a, int64_t b, int stream) {
      auto& values = memory.emplace_back(size_t(a * b));
      for (size_t i = 0; stream && i < values.size(); ++i) {
        values[i] = 0.3f * normal(1, uint64_t(stream * 100 + comm.rank()), i);
      }
      return Tensor(values.data(), DType::f32, {a, b});
    };
    const Tensor x = tensor(rows.count, kIn, 1), w1 = tensor(n, kIn, 2), w2 = tensor(kIn, n, 3);
    const Tensor h = tensor(kM, n, 0), y = tensor(rows.count, kIn, 0), dh = tensor(kM, n, 0);
    const Tensor dx = tensor(rows.count, kIn, 0), dw1 = tensor(n, kIn, 0);

    const OverlapOptions options{.strategy = Strategy::overlapped};
    const AgGemm::Shape widen{.m = kM, .n = n, .k = kIn};
    const GemmRs::Shape narrow{.m = kM, .n = kIn, .k = n};
    AgGemm::Shape widen_back = widen;
    GemmRs::Shape narrow_back = narrow;
    widen_back.weight_kn = narrow_back.weight_kn = true;  // `run` receives the weight transposed
    AgGemm up(comm, widen, options), down_backward(comm, widen_back, options);
    GemmRs down(comm, narrow, options), up_backward(comm, narrow_back, options);
    AgWgrad up_wgrad(comm, widen, options);

    const auto forward = [&] {  // loss: half the sum of squares of y, over all ranks
      up.run(x, w1, h);
      for (float& v : memory[3]) v = std::max(0.f, v);
      down.run(h, w2, y);
      float loss = 0;
      for (const float v : memory[4]) loss += v * v / 2;
      all_reduce(comm, {&loss, DType::f32, {1}});
      return loss;
    };
    forward();
    down_backward.run(y, w2.transposed(), dh);  // dy = y
    for (int64_t i = 0; i < h.elements(); ++i) dh.as<float>()[i] *= float(h.as<float>()[i] > 0);
    up_backward.run(dh, w1.transposed(), dx);
    up_wgrad.run(x, dh, dw1);

    for (const auto& [value, gradient] : {std::pair{x, dx}, {w1, dw1}}) {
      float& element = *value.as<float>();
      const float before = element, analytic = *gradient.as<float>(), step = 1e-2f;
      if (comm.rank() == 0) element = before + step;
      const float above = forward();
      if (comm.rank() == 0) element = before - step;
      const float slope = (above - forward()) / (2 * step);
      element = before;
      if (comm.rank() != 0) continue;  // the step changed rank 0's element
      std::printf("gradient %9.5f, difference quotient %9.5f\n", double(analytic), double(slope));
      if (!(std::abs(analytic - slope) < 0.02f * (1 + std::abs(slope)))) correct = false;
    }
  });
  return correct ? 0 : 1;
}

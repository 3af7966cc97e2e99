// Decentralized gradient descent whose neighbours exchange compressed differences to shifts
// ("bits for free", arXiv 2011.01697; LEAD, arXiv 2007.00232). A round of client i:
//   delta_i = Q(x_i - step g_i - step z_i - h_i)     sent to the neighbours
//   y_i = h_i + delta_i;  h_i += alpha delta_i
//   z_i += theta sum_j w_ij (y_i - y_j);  x_i -= step (g_i + z_i)
// The shift h_i follows what is sent, so that deltas, and with them the error of Q, go to 0; sum
// z_i stays 0. A client knows sum_j w_ij h_j of its neighbours from their deltas.
#include <fmt/format.h>

#include <algorithm>

#include "codec/dither.h"
#include "fit/exchange/graph.h"
#include "fit/methods/rows.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

/// Whether errors may be larger than the values, so that smaller weights must keep them from
/// growing.
bool is_coarse(const Wire& wire) {
  return wire.codec == Codec::int2;
}

class Gossip final : public Method {
 public:
  explicit Gossip(const Setup& setup)
      : Method(setup.problem.optimum()),
        setup_(setup),
        wire_(setup.options.codec.value_or(Wire{})),
        graph_(choose_graph(setup.options)),
        step_(setup.options.step.value_or(1) * 2 /
              (setup.problem.max_smoothness() + setup.problem.l2())),
        alpha_(setup.options.control ? 0
               : is_coarse(wire_)    ? 0.25
                                     : 1),
        theta_((is_coarse(wire_) ? 0.1 : 0.5) / step_) {
    const Vector zero(setup.problem.features(), 0.0);
    const Shard local = setup.channel.local_clients();
    for (int64_t c = local.begin; c < local.begin + local.count; ++c)
      clients_.push_back({setup.problem.client(int(c)), zero, zero, zero, zero, zero, zero, zero});
    for (int from = 0; from < graph_.size(); ++from) {
      for (const int to : graph_.neighbours[size_t(from)])
        plan_.push_back({from, to, message_bytes()});
    }
  }

  FloatCount run_round(int64_t round) override {
    const Shard local = setup_.channel.local_clients();
    for (int64_t c = local.begin; c < local.begin + local.count; ++c) encode(int(c), round);
    for (Client& client : clients_)
      std::fill(client.remote_delta.begin(), client.remote_delta.end(), 0.0);
    setup_.channel.exchange(
        plan_,
        [&](size_t i, std::span<std::byte> to) {
          const auto& message = this->local(plan_[i].from).message;
          std::copy(message.begin(), message.end(), to.begin());
        },
        [&](size_t i, std::span<const std::byte> from) {
          Client& to = this->local(plan_[i].to);
          decode(from, delta_);
          const double weight = graph_.weight(plan_[i].from, plan_[i].to);
          for (size_t k = 0; k < delta_.size(); ++k) to.remote_delta[k] += weight * delta_[k];
        });
    for (int64_t c = local.begin; c < local.begin + local.count; ++c) update(int(c));
    const int64_t floats = int64_t(setup_.problem.features()) * graph_.max_degree();
    return {floats, floats};
  }

  std::vector<std::span<const double>> answers() const override {
    std::vector<std::span<const double>> answers;
    for (const Client& client : clients_) answers.emplace_back(client.x);
    return answers;
  }

  std::vector<Setting> settings() const override {
    return {{"step", step_},
            {"alpha", alpha_},
            {"theta", theta_},
            {"bits", 8 * double(message_bytes()) / double(setup_.problem.features())}};
  }

 private:
  struct Client {
    Objective f;
    Vector x, z, gradient;
    Vector shift, remote_shift;  // h_i; sum_j w_ij h_j
    Vector delta, remote_delta;  // of this round
    std::vector<std::byte> message = {};
  };

  Client& local(int client) {
    return clients_[size_t(client - setup_.channel.local_clients().begin)];
  }

  size_t message_bytes() const {
    const size_t d = setup_.problem.features();
    return wire_.is_none() ? d * sizeof(double) : wire_.bytes(int64_t(d), DType::f32);
  }

  void encode(int number, int64_t round) {
    Client& client = local(number);
    client.f.gradient(client.x, client.gradient);
    for (size_t k = 0; k < client.x.size(); ++k) {
      client.delta[k] = client.x[k] - step_ * (client.gradient[k] + client.z[k]) - client.shift[k];
    }
    client.message.resize(message_bytes());
    if (wire_.is_none()) {
      std::ranges::copy(client.delta, as_doubles(std::span(client.message)).begin());
      return;
    }
    std::vector<float> values(client.delta.begin(), client.delta.end());
    const codec::Dither dither{setup_.options.seed,
                               uint64_t(round) << 32 | uint64_t(uint32_t(number))};
    codec::encode_dithered(wire_, Tensor::of(std::span(values), {int64_t(values.size())}), dither,
                           client.message);
    decode(client.message, client.delta);
  }

  void decode(std::span<const std::byte> message, Vector& to) const {
    to.resize(setup_.problem.features());
    if (wire_.is_none()) {
      std::ranges::copy(as_doubles(message), to.begin());
      return;
    }
    std::vector<float> values(to.size());
    tandem::decode(wire_, message, Tensor::of(std::span(values), {int64_t(values.size())}));
    std::ranges::copy(values, to.begin());
  }

  void update(int number) {
    Client& client = local(number);
    double weights = 0;
    for (const int neighbour : graph_.neighbours[size_t(number)])
      weights += graph_.weight(number, neighbour);
    for (size_t k = 0; k < client.x.size(); ++k) {
      const double local_y = client.shift[k] + client.delta[k];
      const double remote_y = client.remote_shift[k] + client.remote_delta[k];
      client.z[k] += theta_ * (weights * local_y - remote_y);
      client.x[k] -= step_ * (client.gradient[k] + client.z[k]);
      client.shift[k] += alpha_ * client.delta[k];
      client.remote_shift[k] += alpha_ * client.remote_delta[k];
    }
  }

  const Setup setup_;
  const Wire wire_;
  const Graph graph_;
  const double step_, alpha_, theta_;
  std::vector<Client> clients_;
  std::vector<Message> plan_;
  Vector delta_;  // of the message that is read
};

void check_gossip(const FitOptions& options) {
  const Wire wire = options.codec.value_or(Wire{});
  if (!wire.is_none() && !codec::can_dither(wire)) {
    throw InvalidArgument(fmt::format(
        "--codec {}: expected none or int8 to int2, whose codes are rounded stochastically",
        wire.describe()));
  }
  choose_graph(options);
}

}  // namespace

const MethodRow& gossip_row() {
  static const MethodRow row{"gossip",
                             "neighbours on a graph exchange compressed differences to shifts",
                             {&kGraphOption, &kCodecOption, &kStepOption},
                             false,
                             "compresses values, not their differences to shifts",
                             check_gossip,
                             [](const Setup& setup) -> std::unique_ptr<Method> {
                               return std::make_unique<Gossip>(setup);
                             }};
  return row;
}

}  // namespace tandem::fit

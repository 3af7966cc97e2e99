#include "fit/exchange/star.h"

#include <algorithm>
#include <vector>

namespace tandem::fit {
namespace {

void send(Channel& channel, std::span<const int> clients, bool up, const Floats& floats,
          const WriteFloats& write, const ReadFloats& read) {
  std::vector<Message> plan;
  plan.reserve(clients.size());
  for (const int client : clients) {
    plan.push_back({up ? client : kServer, up ? kServer : client, floats(client) * sizeof(double)});
  }
  channel.exchange(
      plan, [&](size_t i, std::span<std::byte> to) { write(clients[i], as_doubles(to)); },
      [&](size_t i, std::span<const std::byte> from) { read(clients[i], as_doubles(from)); });
}

}  // namespace

void send_up(Channel& channel, std::span<const int> clients, const Floats& floats,
             const WriteFloats& write, const ReadFloats& read) {
  send(channel, clients, true, floats, write, read);
}

void send_down(Channel& channel, std::span<const int> clients, const Floats& floats,
               const WriteFloats& write, const ReadFloats& read) {
  send(channel, clients, false, floats, write, read);
}

void broadcast_down(Channel& channel, std::span<const int> clients, std::span<const double> vector,
                    const ReadFloats& read) {
  send_down(
      channel, clients, [&](int) { return vector.size(); },
      [&](int, std::span<double> to) { std::copy(vector.begin(), vector.end(), to.begin()); },
      read);
}

}  // namespace tandem::fit

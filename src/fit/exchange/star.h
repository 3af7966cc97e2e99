// Exchanges between the clients and the server, in doubles.
#pragma once

#include <functional>
#include <span>

#include "fit/exchange/channel.h"

namespace tandem::fit {

using Floats = std::function<size_t(int client)>;
using WriteFloats = std::function<void(int client, std::span<double> message)>;
using ReadFloats = std::function<void(int client, std::span<const double> message)>;

/// Sends floats(c) numbers of each of `clients` to the server, which reads them in this order.
void send_up(Channel& channel, std::span<const int> clients, const Floats& floats,
             const WriteFloats& write, const ReadFloats& read);
/// Sends floats(c) numbers of the server to each of `clients`.
void send_down(Channel& channel, std::span<const int> clients, const Floats& floats,
               const WriteFloats& write, const ReadFloats& read);

/// Copies `vector` of the server to `clients`, whose ranks get it by `read`.
void broadcast_down(Channel& channel, std::span<const int> clients, std::span<const double> vector,
                    const ReadFloats& read);

}  // namespace tandem::fit

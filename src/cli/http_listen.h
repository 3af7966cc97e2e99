// Parts that the program's HTTP servers share. Needs Boost.
#pragma once

#include <boost/asio.hpp>
#include <string>
#include <string_view>

#include "cli/listen_address.h"

namespace tandem::cli {

/// Socket that listens at `address`. Throws IoError that begins with `name`.
boost::asio::ip::tcp::acceptor listen_at(boost::asio::io_context& context,
                                         const ListenAddress& address, std::string_view name);

/// URL of a listening socket, with the typed host if it listens at all addresses.
std::string url_of(const boost::asio::ip::tcp::endpoint& at, const ListenAddress& typed);

/// Whether the host of a request is an address of this machine's loopback, localhost or the `typed`
/// one: a page of another site may give its name such an address, and its scripts must not read
/// what is served.
bool is_local_host(std::string_view host, std::string_view typed);

}  // namespace tandem::cli

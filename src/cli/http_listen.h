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

/// Whether the host of a request is this machine's loopback: a page of another site may give its
/// name that address, and its scripts must not read what is served.
bool is_local_name(std::string_view host);

}  // namespace tandem::cli

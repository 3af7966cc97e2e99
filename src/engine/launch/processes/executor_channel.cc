#include "engine/launch/processes/executor_channel.h"

#include <array>
#include <charconv>

#include "comm/rendezvous/secret.h"
#include "comm/rendezvous/store_protocol.h"

namespace tandem {

control::Credentials executor_credentials(const std::string& secret, const std::string& run_id) {
  control::Secret key = control::read_secret(secret, "");
  key.source = "this launch";
  return control::credentials_of(key, run_id + " executors");
}

// Each byte is the character of its number.
std::string text_of_bytes(std::string_view bytes) {
  std::string text;
  for (const char each : bytes) {
    const auto byte = uint8_t(each);
    if (byte >= 0x80) text += char(0xc0 | byte >> 6);
    text += byte < 0x80 ? each : char(0x80 | (byte & 0x3f));
  }
  return text;
}

std::string bytes_of_text(std::string_view text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_pair = uint8_t(text[i]) >= 0x80 && i + 1 < text.size();
    bytes += is_pair ? char(uint8_t(text[i]) << 6 | (text[i + 1] & 0x3f)) : text[i];
    i += is_pair;
  }
  return bytes;
}

// The value is the message's name, as text: its header's own is the word.
void ExecutorChannel::send_bytes(uint64_t word, int slot, uint64_t value, std::string_view text) {
  if (!open()) return;
  const std::string name = std::to_string(value);
  const control::Header header{control::Kind::event, slot, word, uint32_t(name.size()),
                               uint32_t(text.size())};
  channel_.queue(control::Channel::serialize(header, name, control::bytes_of(text)));
  channel_.drain();
  sent_ = control::Clock::now();
}

bool ExecutorChannel::serve(const Receive& receive) {
  if (!open()) return false;
  const bool alive = channel_.fill();
  control::Message message;
  while (open() && channel_.take(message)) {
    heard_ = control::Clock::now();
    const std::string_view name = control::key_of(message);
    uint64_t value = 0;
    std::from_chars(name.data(), name.data() + name.size(), value);
    receive(message.header.value, message.header.rank, value,
            control::text_of(control::blob_of(message)));
  }
  return alive && open() && channel_.drain();
}

}  // namespace tandem

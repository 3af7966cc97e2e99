#include "train/collective_check.h"

#include <exception>

#include "tandem/error.h"

namespace tandem {

std::string on_rank_zero(Communicator& world, std::string_view what,
                         const std::function<std::string()>& work) {
  std::string outcome;  // one letter for the kind, then the text
  const auto failed = [&](char kind, const std::exception& error) {
    outcome.assign(1, kind);
    outcome.append(error.what());
  };
  if (world.rank() == 0) {
    try {
      outcome.assign(1, '+');
      outcome.append(work());
    } catch (const ConfigError& error) {
      failed('c', error);
    } catch (const IoError& error) {
      failed('i', error);
    } catch (const std::exception& error) {
      failed('e', error);
    }
  }
  const auto blobs = world.exchange(std::as_bytes(std::span(outcome)), what);
  const std::string text(reinterpret_cast<const char*>(blobs[0].data()), blobs[0].size());
  const std::string message = text.substr(1);
  if (text[0] == 'c') throw ConfigError(message);
  if (text[0] == 'i') throw IoError(message);
  if (text[0] == 'e') throw Error(message);
  return message;
}

}  // namespace tandem

// Default floating-point settings for the calling thread, for the life of an object. Reductions run on any thread that
// makes progress. That is often the user's thread, which may round in another way or flush denormals (Intel's OpenMP
// and torch.set_flush_denormal do). Ranks would then get different bits.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace ddl {

class DefaultFloats {
  public:
    DefaultFloats() : before_(get()) {
        if (before_ != kDefault) set(kDefault);
    }
    // Also clears the exception flags that our arithmetic has raised.
    ~DefaultFloats() { set(before_); }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

  private:
#if defined(__x86_64__) || defined(__i386__)
    using Word = unsigned int;
    static constexpr Word kDefault = 0x1f80;  // MXCSR: all exceptions masked, round to nearest, keep denormals
    static Word get() { return _mm_getcsr(); }
    static void set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word kDefault = 0;  // FPCR
    static Word get() {
        Word word;
        __asm__ volatile("mrs %0, fpcr" : "=r"(word)::"memory");
        return word;
    }
    static void set(Word word) { __asm__ volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
#error "say here how this processor's floating-point settings are read and set"
#endif
    const Word before_;
};

}  // namespace ddl

"""What a spec can say: experiments, callbacks, tracking, and the reference generated from them."""
